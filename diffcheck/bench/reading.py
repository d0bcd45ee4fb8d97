"""How long it takes only to read the pages of a decode problem: the floor under every decode kernel.

One program reads a page whole, adds its words up in 64 sums and writes them, so that as much is read and written as by
a kernel that scores.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 64
"""Words that a page's sums are, one an entry."""


@triton.jit
def read_pages_kernel(pages_ptr, table_ptr, out_ptr, PARTS: tl.constexpr, WORDS: tl.constexpr):
    """One program reads one page of PARTS * WORDS int32 words."""
    place = tl.program_id(0)
    first = tl.load(table_ptr + place).to(tl.int64) * (PARTS * WORDS)
    word = tl.arange(0, WORDS)
    total = tl.zeros((WORDS,), tl.int32)
    WHOLE: tl.constexpr = PARTS // 16 * 16
    for part in tl.static_range(0, WHOLE, 16):
        block = tl.load(pages_ptr + first + part * WORDS + tl.arange(0, 16 * WORDS))
        total += tl.sum(tl.reshape(block, (16, WORDS)), axis=0)
    for part in tl.static_range(WHOLE, PARTS):
        total += tl.load(pages_ptr + first + part * WORDS + word)
    tl.store(out_ptr + place.to(tl.int64) * WORDS + word, total)


def read_pages(pages: Tensor, block_table: Tensor) -> Tensor:
    """int32 [pages named by the table, 64]: sums of words 0, 64, 128 .., 1, 65 .. of each.

    pages: uint8 [P, page_bytes], page_bytes a multiple of 256; block_table: int32, any shape.
    """
    out = torch.empty(block_table.numel(), WORDS, dtype=torch.int32, device=pages.device)
    read_pages_kernel[(block_table.numel(),)](
        pages.view(torch.int32), block_table, out, PARTS=pages.shape[1] // (4 * WORDS), WORDS=WORDS, num_warps=1
    )
    return out
