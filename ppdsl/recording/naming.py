"""What a torch function does, as far as its name tells."""

from __future__ import annotations

__all__ = ["EFFECTS", "PLAIN_METHODS", "PLAIN_PROPERTIES", "TO_PYTHON", "writes_in_place"]

# Properties and methods that tell something of a tensor which its fake knows as well.
PLAIN_PROPERTIES = frozenset(
    "shape dtype device ndim layout is_cuda is_cpu is_meta is_sparse is_quantized requires_grad grad_fn is_leaf names "
    "itemsize nbytes is_mkldnn is_xla is_xpu is_mps is_nested is_sparse_csr is_vulkan is_ipu is_hpu is_mtia is_maia "
    "output_nr name _backward_hooks _version retains_grad volatile _base is_ort is_inference _is_view".split()
)
PLAIN_METHODS = frozenset(
    "size dim stride numel __len__ is_floating_point is_contiguous storage_offset nelement ndimension __hash__ "
    "is_complex get_device element_size is_signed is_same_size __repr__ is_inference _is_view type_ is_shared "
    "has_names result_type can_cast promote_types broadcast_shapes untyped_storage data_ptr storage".split()
)
# Results that are Python values and depend on the numbers inside a tensor.
TO_PYTHON = frozenset(
    "item tolist __bool__ __int__ __float__ __index__ __complex__ numpy is_nonzero equal allclose __contains__ "
    "__array__ __format__".split()
)
# They give no tensor of their own but change what autograd does.
EFFECTS = frozenset(
    "register_hook requires_grad_ retain_grad backward register_post_accumulate_grad_hook __set__ detach_".split()
)


_NOT_IN_PLACE = ("__init__", "__index__", "__int__", "__invert__", "__iter__")


def writes_in_place(name: str) -> bool:
    """Whether torch's naming says that a function writes its first argument."""
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_")
