"""Is a cache whole, and does it say what its target says? Bytes against checksums, rows against a live pass.

Knows caches and targets. Does not know how to build or repair one.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.cache.codecs import STATE_CODECS, kept_kl
from draftsmith.data.cache.manifest import NAME, read_manifest
from draftsmith.data.cache.reader import CachedRow, CacheReader
from draftsmith.data.cache.writer import shard_damage
from draftsmith.errors import UserError
from draftsmith.models.target import Target

# Two runs of one target differ by the order of summation, and in half precision by its rounding, block after block.
LIVE_ERROR = {torch.float32: 0.0, torch.bfloat16: 0.05, torch.float16: 0.02}
DISTRIBUTION_KL = 1e-5


def verify_cache(folder: Path) -> list[str]:
    """Read every byte. One line for each damaged shard and each stray file, beginning with its name, and one for missing rows."""
    manifest = read_manifest(folder)
    found = [damage for shard in manifest.shards if (damage := shard_damage(folder, shard))]
    known = {NAME, *(shard.name for shard in manifest.shards)}
    strays = sorted(path.name for path in Path(folder).iterdir() if path.name not in known)
    found += [f"{name}: not part of the cache (a crash left it, or somebody put it there)" for name in strays]
    if manifest.missing_rows:
        found.append(f"incomplete: {manifest.missing_rows} of {manifest.rows} rows were never written")
    return found


def cache_info(folder: Path) -> dict[str, Any]:
    """What is in a cache, without opening a shard: the manifest with totals in place of the list of shards."""
    manifest = read_manifest(folder)
    stored = sum(shard.bytes for shard in manifest.shards)
    tokens = sum(shard.tokens for shard in manifest.shards)
    mass = sum(shard.kept_mass * shard.tokens for shard in manifest.shards) / max(tokens, 1)
    totals = {
        "shards": len(manifest.shards),
        "missing_rows": manifest.missing_rows,
        "dropped_rows": manifest.dropped_rows,
        "bytes": stored,
        "bytes_per_token": stored / max(tokens, 1),
        "kept_mass": mass,
    }
    return manifest.model_dump(mode="json", exclude={"shards"}) | totals


def check_against_target(folder: Path, target: Target) -> list[str]:
    """Compare the longest row of each shard with what `target` computes. One line for each disagreement."""
    reader = CacheReader(folder, target.fingerprint())
    found: list[str] = []
    first = 0
    for shard in reader.manifest.shards:
        index = max(range(first, first + shard.rows), key=lambda row: int(reader.lengths[row]))
        found += [
            f"{shard.name}, row {index}: {line}" for line in self_check(target, reader.manifest.fields, reader[index])
        ]
        first += shard.rows
    return found


@torch.inference_mode()
def self_check(target: Target, fields: dict[str, dict[str, Any]], row: CachedRow) -> list[str]:
    """What of one cached row a live forward pass contradicts: taps and last by relative error, distributions by KL.

    A tap of another block, a state before the norm or a shifted distribution differs by far more than any codec does.
    """
    blocks = tuple(fields["taps"]["blocks"]) if row.taps is not None else ()
    if blocks and not (min(blocks) >= 0 and max(blocks) < target.blocks):
        raise UserError(f"cache field taps: blocks {list(blocks)} do not exist in a target of {target.blocks} blocks")
    ids = torch.from_numpy(row.token_ids).to(target.device, torch.int64)[None]
    live = target.forward(ids, taps=blocks)
    assert live.logits is not None  # asked for by default
    noise = LIVE_ERROR.get(target.dtype, 0.0)
    found: list[str] = []
    for field, stored, states in (("taps", row.taps, live.taps), ("last", row.last, live.last)):
        if stored is not None and states is not None:
            codec = STATE_CODECS[fields[field]["codec"]]
            error = _relative_error(torch.from_numpy(stored), states[0])
            if not error <= codec.tolerance + noise:  # written so that NaN fails too
                found.append(
                    f"{field} differ from the target's by {error:.3g} (relative), allowed {codec.tolerance + noise:.3g}"
                )
    log_p = torch.log_softmax(live.logits[0].float(), dim=-1).cpu()
    if row.last is not None:
        rebuilt = target.head(torch.from_numpy(row.last).to(target.device, target.dtype)).float().cpu()
        kl = float(kept_kl(log_p, torch.log_softmax(rebuilt, dim=-1)).mean())
        allowed = STATE_CODECS[fields["last"]["codec"]].kl + noise
        if not kl <= allowed:
            found.append(f"logits rebuilt from last have KL {kl:.3g} to the target's, allowed {allowed:.3g}")
    if row.distribution is not None:
        ids_kept, log_kept = (torch.from_numpy(array) for array in row.distribution)
        kl = float(kept_kl(log_p.gather(-1, ids_kept), log_kept).mean())
        if not abs(kl) <= DISTRIBUTION_KL + noise:
            found.append(f"distribution has KL {kl:.3g} to the target's, allowed {DISTRIBUTION_KL + noise:.3g}")
    return found


def _relative_error(stored: Tensor, live: Tensor) -> float:
    """The largest ‖stored − live‖ / ‖live‖ over tokens and taps; states are [..., W]."""
    live = live.float().cpu()
    return float(((stored - live).norm(dim=-1) / live.norm(dim=-1).clamp_min(1e-12)).max())
