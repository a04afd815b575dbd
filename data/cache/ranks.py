"""Which of several processes this is, and how they wait for each other (`accelerate launch`, `torchrun`).

Knows the launcher's environment. Does not know what the ranks share out.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """This process is number `index` of `count`; `barrier()` returns when all have called it."""

    index: int = 0
    count: int = 1
    barrier: Callable[[], None] = lambda: None


def launched_ranks(on_cpu: bool) -> Ranks:
    """The ranks that a launcher started (environment variables RANK, WORLD_SIZE); one without a launcher."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks()
    import torch
    from accelerate import PartialState

    threads = torch.get_num_threads()
    state = PartialState(cpu=on_cpu)
    torch.set_num_threads(threads)  # accelerate may take all cores for each rank; other threads round otherwise, too
    return Ranks(state.process_index, state.num_processes, state.wait_for_everyone)
