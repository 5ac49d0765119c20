"""How prompts run through mixtures of experts: warp-group MMA on the codes of each expert, or experts dequantized for a 16-bit
grouped GEMM. Pure functions of the problem and the device, never of the ids."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.device import GPU, Capability, supports_wgmma
from halfbyte.plans.experts_mma import ExpertsPlan, tuned_experts
from halfbyte.plans.linear_spec import ExpertsProblem, LinearProblem, LinearWgmmaSpec
from halfbyte.plans.linear_wgmma import wgmma_shape
from halfbyte.reference.experts import Activation

#: Pairs of a token and an expert, for each expert, from which on a dequantized GEMM is faster than the portable kernel: on an H200
#: from 32 in some projections, from 128 in all but one. On Hopper the grouped kernel comes first where it can run, but
#: for act-order.
_PAIRS = 96
#: Bytes of dequantized weights at a time, and rows of each expert at least.
SCRATCH_BYTES, _FEWEST_ROWS = 512 << 20, 128
#: The most pairs for each expert that warp-group MMA takes in bf16, with groups below 64 and with larger ones: more are faster
#: dequantized. Up to _FEW_PAIRS a block has 32 of them. Measured with int4_g128 and mxfp4 (docs/internals/log/linear.md).
_MOST_PAIRS, _FEW_PAIRS = (256, 512), 24
#: Generations of GPUs whose grouped GEMM (`torch.nn.functional.grouped_mm`, bf16) reads its groups on the device.
_GROUPED = (9, 10)


def dequantized_rows(p: ExpertsProblem, capability: Capability) -> int:
    """Rows of each expert to dequantize at a time; 0: the codes are multiplied as they are.

    Dequantized weights are written and read once, which pays from some tokens an expert on. All experts count: the ids are on the
    device.
    """
    experts, features, width = p.stack
    if p.half != "bf16" or capability[0] not in _GROUPED or width % 8 or p.pairs < _PAIRS * experts:
        return 0
    rows = SCRATCH_BYTES // (2 * experts * width) // _FEWEST_ROWS * _FEWEST_ROWS
    return min(features, max(_FEWEST_ROWS, rows))


@dataclass(frozen=True)
class ExpertsWgmmaSpec(LinearWgmmaSpec):
    """Everything the grouped kernel (kernels/linear/experts_wgmma.py) is compiled for; block_m: of an expert's pairs.

    activation  of pairs of columns; None: none
    onward      the block of the projection that takes the results as its x; None: none
    """

    activation: Activation | None = None
    onward: LinearWgmmaSpec | None = None

    @property
    def halves(self) -> int:
        """Columns of the product that become one of the result."""
        return 1 if self.activation is None else 2


@dataclass(frozen=True)
class ExpertsWgmmaPlan:
    """A launch of the grouped kernel: what it is compiled for, its programs, and the most blocks of pairs that there can be."""

    spec: ExpertsWgmmaSpec
    programs: int
    blocks: int


def gluon_experts(p: ExpertsProblem, gpu: GPU, use_pdl: bool) -> ExpertsPlan | ExpertsWgmmaPlan | str:
    """How a tuned kernel computes a call, that for few tokens or the grouped one; in words, why neither can."""
    few = tuned_experts(p, gpu, use_pdl)
    groups = wgmma_experts(p, gpu) if isinstance(few, str) else few
    return f"{few}; {groups}" if isinstance(few, str) and isinstance(groups, str) else groups


def wgmma_experts(p: ExpertsProblem, gpu: GPU) -> ExpertsWgmmaPlan | str:
    """How warp-group MMA computes a prompt; in words, why it cannot."""
    experts, features, width = p.stack
    if not supports_wgmma(gpu.capability):
        return f"compute capability {gpu.capability[0]}.{gpu.capability[1]}; wgmma needs 9.0"
    most = _MOST_PAIRS[p.format.group_size(width) >= 64]
    if p.half == "bf16" and p.pairs > most * experts:
        return f"{p.pairs} pairs of a token and one of {experts} experts; wgmma takes up to {most} for each expert"
    dense = wgmma_shape(LinearProblem(((p.format, features),), 64, width, p.half), use_pdl=False)
    if not isinstance(dense, str) and (p.pairs <= _FEW_PAIRS * experts or (dense.halved and not dense.fold)):
        # Where sums of 32 k are scaled, a block of 64 pairs has too few registers.
        dense = wgmma_shape(LinearProblem(((p.format, features),), 32, width, p.half), use_pdl=False)
    if isinstance(dense, str):
        return dense
    spec = ExpertsWgmmaSpec(**vars(dense), activation=p.activation)
    blocks = p.pairs // spec.block_m + min(experts, p.pairs)
    tiles = blocks * -(-features // spec.tile)
    if tiles * -(-width // spec.step) >= 2**24 or experts * features >= 2**31:
        return f"{experts} experts of [{features}, {width}]; the grouped kernel counts steps of tiles up to 2^24"
    return ExpertsWgmmaPlan(spec, min(gpu.num_sms, tiles), blocks)
