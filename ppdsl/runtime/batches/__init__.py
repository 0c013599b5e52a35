"""From a call to micro-batches and back: which axes are the batch's, how it is cut, how results are joined."""
