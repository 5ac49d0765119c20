"""Quantized weights: what each format costs in bytes and in error, and a fused q/k/v projection with unequal formats.

python examples/02_weights.py
"""

import torch

import halfbyte

torch.manual_seed(0)
weight, x = torch.randn(512, 1024) / 32, torch.randn(4, 1024)
exact = x @ weight.T

print(f"{'format':14} bits/element  relative error of y")
for name in halfbyte.WEIGHT_FORMATS:
    packed = halfbyte.quantize(weight, name)
    error = (halfbyte.linear(x, packed) - exact).norm() / exact.norm()
    print(f"{name:14} {8 * packed.nbytes / weight.numel():12.3f}  {float(error):.4f}")

q, k, v = halfbyte.qkv_projection(
    x,
    (
        halfbyte.quantize(weight, "nvfp4"),
        halfbyte.quantize(weight[:128], "int8_col"),
        halfbyte.quantize(weight[128:256], "int4_g64"),
    ),
)
print(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")
