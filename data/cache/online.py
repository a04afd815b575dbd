"""The rows of a cache without a cache: the target computes every batch when it is asked for (`cache.online: true`).

Knows target, rows and distribution codecs. States are exact, as no disk asks for less; distributions are those that a cache
would hold. Batches equal those of a `CacheReader`, so a trainer takes either.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from draftsmith.data.batches import Batch, collate, collate_rows
from draftsmith.data.cache.build import check_rows
from draftsmith.data.cache.codecs import DISTRIBUTION_CODECS, tensor_name
from draftsmith.data.cache.fields import cache_fields, row_uniforms
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CachedRow, CacheReader, decode_row
from draftsmith.data.rows import Rows
from draftsmith.errors import UserError
from draftsmith.files import digest
from draftsmith.models.target import Target


class OnlineRows(Sequence[CachedRow]):
    """The target's knowledge of prepared rows, computed on demand and forgotten. Nothing is written."""

    def __init__(self, target: Target, rows: Rows, settings: CacheSettings) -> None:
        """Raises `UserError` when the rows do not fit the target."""
        self.target, self._rows = target, rows
        self.lengths: np.ndarray = rows.lengths  # int64 [rows]
        self.domains: list[str] = rows.domains
        self.fields = cache_fields(settings, target.width, target.vocabulary, target.blocks)
        check_rows(target, rows, self.lengths)
        # States are kept as they come; of what is stored only the distribution is a choice.
        self._decoded_as = {
            field: about | ({} if field == "distribution" else {"codec": "fp32"})
            for field, about in self.fields.items()
        }

    @property
    def taps(self) -> tuple[int, ...]:
        """The blocks whose outputs a row has, counted from 0."""
        return tuple(self.fields.get("taps", {}).get("blocks", ()))

    @property
    def identity(self) -> str:
        """Changes with the target, the rows and what is kept of them, as a cache's does."""
        return digest([self.target.fingerprint(), self._rows.digest, self.fields])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._compute([range(len(self))[index]])[0]

    def __iter__(self) -> Iterator[CachedRow]:
        return (self[index] for index in range(len(self)))

    def batch(self, indices: Sequence[int]) -> Batch:
        """Some rows, padded: one forward pass of the target (`draftsmith.train.loop.Source`)."""
        return collate(self._compute(indices))

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and mask of a row; nothing is computed."""
        row = self._rows[index]
        return row.token_ids, row.supervised

    def domain(self, index: int) -> str:
        """The domain of a row; nothing is computed."""
        return self._rows.domain(index)

    @torch.inference_mode()
    def _compute(self, indices: Sequence[int]) -> list[CachedRow]:
        rows = [self._rows[int(index)] for index in indices]
        ids = collate_rows(rows).token_ids.to(self.target.device)
        output = self.target.forward(ids, taps=self.taps, want_logits=False)
        found: list[CachedRow] = []
        for place, row in enumerate(rows):
            length = len(row.token_ids)
            last = output.last[place, :length]
            parts = {"token_ids": torch.from_numpy(row.token_ids), "supervised": torch.from_numpy(row.supervised)}
            if output.taps is not None:
                parts["taps"] = output.taps[place, :length].float().cpu()
            parts["last"] = last[:, None].float().cpu()
            for field in ("taps", "last"):
                if field in parts and not bool(torch.isfinite(parts[field]).all()):
                    raise UserError(
                        f"the target's {field} are not finite in document {row.document};"
                        " load it with dtype float32, or leave the document out"
                    )
            about = self.fields["distribution"]
            if (codec := DISTRIBUTION_CODECS[about["codec"]]).parts:
                uniforms = row_uniforms(row.token_ids).to(last.device)
                encoded = codec.encode(self.target.head(last), about["k"], uniforms)
                parts |= {tensor_name("distribution", part): values.cpu() for part, values in encoded.items()}
            found.append(decode_row(self._decoded_as, parts.__getitem__, row.domain))
        return found


AnyCache = CacheReader | OnlineRows
