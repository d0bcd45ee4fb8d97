"""What DeepSeek computes: a plain torch port of the V4 indexer, to be read beside the published inference code.

Nothing here can be configured beyond what the published code has. Deployments, precisions and suspected faults are
recipes of the pipeline in `diffcheck`, which composes these same functions; a test holds the two equal bit for bit.
"""

from .config import V4_FLASH, V4_PRO, IndexerConfig, Yarn
from .errors import InputError
from .indexer import IndexerState, run_indexer
from .trace import KEY_STAGES, QUERY_STAGES, STAGES, Trace, load_traces, save_traces
from .weights import IndexerWeights, dequantise_weight

__all__ = [
    "KEY_STAGES",
    "QUERY_STAGES",
    "STAGES",
    "V4_FLASH",
    "V4_PRO",
    "IndexerConfig",
    "IndexerState",
    "IndexerWeights",
    "InputError",
    "Trace",
    "Yarn",
    "dequantise_weight",
    "load_traces",
    "run_indexer",
    "save_traces",
]
