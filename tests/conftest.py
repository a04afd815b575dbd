"""One thread per test process: the tensors are tiny, and `make test` runs a process per core."""

import torch

torch.set_num_threads(1)
