"""Every launch choice of the kernels, one table per architecture.

sm_90 was measured on one H200 (see NOTES.md); the rest is reasoning, marked so. Nothing here changes a result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .rounding import INTERPRETED


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """The Triton kernels of one major compute capability."""

    warps: dict[str, int] = field(default_factory=lambda: {"e4m3": 4, "bf16": 4, "e2m1": 8})
    """Warps of one program by key format; unpacking e2m1 would spill with 4."""
    prefill_warps: int = 8
    """Warps of the query-stationary prefill kernel: the fewest that compile without spilling."""
    prefill_stages: int = 3
    prefill_tiles: int = 128
    """Tiles of 64 keys that one program walks over."""
    query_warps: int = 1
    """Warps that quantise 32 rows; more than one has to exchange them."""
    query_stages: dict[str, int] = field(default_factory=lambda: {"e4m3": 2, "bf16": 2, "e2m1": 2})
    """Blocks of rows of one program that are loaded or computed at a time, by query format."""
    query_programs: int = 12
    """Programs on one multiprocessor."""
    key_warps: int = 2
    """Warps that pool and store one entry."""
    topk_warps: int = 8
    topk_registers: tuple[int, int] = (128, 128)
    """Registers of a thread that appends to a list, and of one that also shrinks it: few that do not spill."""
    topk_programs: int = 3
    """Programs on one multiprocessor; rows that would leave some without work may be shared in a tournament."""
    tournament_width: int = 4096
    """Scores that one program holds, and the most lists' worth that it merges."""
    tournament_scores: int = 512
    """Scores of one warp."""
    tournament_registers: int = 80
    tournament_rows: int = 96
    """Most rows of a tournament of several rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hopper:
    """The Gluon kernels of sm_90."""

    prefill_columns: dict[bool, int] = field(default_factory=lambda: {False: 256, True: 128})
    """Rows x heads of one program, by exact; two accumulators of half of them live in registers."""
    prefill_slots: dict[bool, int] = field(default_factory=lambda: {False: 2, True: 4})
    """Key tiles in flight, and of one loop iteration, by exact."""
    prefill_programs: int = 2
    """Programs on one multiprocessor."""
    prefill_tiles: tuple[int, ...] = (1024, 512, 256, 128, 64, 32, 16, 8)
    """Tiles of 64 keys that one program may walk over."""
    prefill_start: int = 2
    """How many tiles the start of a program costs."""
    select_columns: int = 128
    """Rows x heads of one program: its accumulator lives in registers, and several programs on a multiprocessor."""
    select_programs: dict[bool, int] = field(default_factory=lambda: {False: 4, True: 3})
    """Programs on one multiprocessor, by exact."""
    select_registers: dict[bool, int] = field(default_factory=lambda: {False: 128, True: 168})
    select_segment: int = 4096
    """Keys that a program scores before it looks at the scores; a multiple of 512."""
    decode_slots: dict[str, int] = field(
        default_factory=lambda: {"e4m3": 2, "e4m3 exact": 2, "bf16": 2, "e2m1": 2, "e2m1 exact": 2}
    )
    """Pages in flight of one program."""
    decode_sums: dict[str, bool] = field(default_factory=lambda: {"e4m3": False, "e4m3 exact": True, "bf16": False})
    """Whether relu is a sum, see `hopper.score_of`: where registers are unpacked, on the pipe of the maximum. e2m1 has
    its own ways, see `hopper_e2m1`.
    """
    decode_programs: dict[str, tuple[int, int]] = field(
        default_factory=lambda: {
            "e4m3": (5, 4),
            "e4m3 exact": (4, 3),
            "bf16": (4, 3),
            "e2m1": (4, 3),
            "e2m1 exact": (4, 2),
        }
    )
    """Programs on one multiprocessor: where rows x heads of a request are at most 64, and where they are more."""
    decode_registers: dict[str, tuple[int, int]] = field(
        default_factory=lambda: {
            "e4m3": (96, 128),
            "e4m3 exact": (128, 168),
            "bf16": (128, 168),
            "e2m1": (128, 168),
            "e2m1 exact": (112, 255),
        }
    )
    """Limits of registers a thread, so that the programs above fit."""
    decode_columns: int = 128
    """Most rows x heads of one program."""
    query_warps: int = 4
    """Warps of one program, a tile of 16 rows each."""
    query_programs: int = 4
    """Programs on one multiprocessor."""
    query_registers: int = 128
    """Limit of registers a thread, so that the programs above fit."""
    decode_requests: int = 1024
    """Most requests whose lengths one program holds."""


SM90 = Hopper()
PLAIN = {
    9: Plain(prefill_warps=4, topk_registers=(64, 80), query_stages={"e4m3": 3, "bf16": 3, "e2m1": 2}),
    10: Plain(),  # by reasoning: as sm_90 where nothing spills
    12: Plain(prefill_warps=4),  # by reasoning: no warpgroup instructions, a quarter of the tile per warp
}
"""By major compute capability; others take 10's."""


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def programs(device: torch.device, each: int, blocks: int) -> int:
    """Programs to launch for so many blocks of work: `each` on every multiprocessor; interpreted, so few that their
    loops turn.
    """
    if device.type != "cuda":
        return min(blocks, 3)
    return min(blocks, each * multiprocessors(device))


def on_hopper(tensor: Tensor) -> bool:
    """Whether the sm_90 kernels can run on a tensor's device."""
    return not INTERPRETED.value and tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] == 9


def plain(device: torch.device) -> Plain:
    """The table of a device; interpreted, Hopper's."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    return PLAIN.get(major, PLAIN[10])
