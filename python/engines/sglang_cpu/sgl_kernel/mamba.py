"""Kernels of recurrent state, which SGLang imports by name. It calls none of them for a model with short convolutions."""

import torch

import sgl_kernel

__getattr__ = sgl_kernel.__getattr__
for name in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"):
    setattr(torch.ops.sgl_kernel, name, getattr(sgl_kernel, name))
