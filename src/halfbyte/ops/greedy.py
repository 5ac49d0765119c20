"""`greedy`: the most likely next token of each sequence, appended to what a batch holds; two launches on a GPU."""

from __future__ import annotations

import torch

from halfbyte.arguments import check_tensor
from halfbyte.errors import check
from halfbyte.ops._library import level
from halfbyte.reference import greedy as reference
from halfbyte.reference.greedy import Ends, Held


def greedy(logits: torch.Tensor, held: Held, ends: Ends | None = None, *, impl: str = "auto") -> None:
    """Append argmax(logits) [B, V] to `held`, in place. Ties and NaN are those of `torch.argmax` over fp32.

    With `ends`, a finished sequence is given padding and grows no more. On a GPU a token beyond the columns of ids is counted and
    not written. Raises `InvalidArgument` naming the argument at fault.
    """
    check_tensor("logits", logits, ("B", "V"))
    batch, device = len(logits), logits.device
    check(logits.shape[1] > 0, "logits has no columns; expected one for each token of the vocabulary")
    check_tensor("held.ids", held.ids, (batch, "columns"), "integer", device)
    check_tensor("held.last", held.last, (batch, 1), "integer", device)
    check_tensor("held.lengths", held.lengths, (batch, 1), "integer", device)
    flags = held.unfinished
    check(
        flags.dtype is torch.bool and flags.shape == (batch,) and flags.device == device,
        f"held.unfinished is {flags.dtype} {list(flags.shape)} on {flags.device}; expected torch.bool [{batch}] on {device}",
    )
    if ends is not None:
        check_tensor("ends.tokens", ends.tokens, ("E",), "integer", device)
        check_tensor("ends.padding", ends.padding, (), "integer", device)
    if not batch:
        return
    if level("greedy", impl, device) != "triton":
        reference.greedy(logits, held, ends)
        return
    from halfbyte.kernels.block.greedy import launch

    with torch.cuda.device_of(logits):
        launch(logits if logits.stride(1) == 1 else logits.contiguous(), held, ends)
