"""Several pipelines that train one model: data parallelism and sharded parameters."""
