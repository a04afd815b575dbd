"""Whether some content was met before, in ten bytes or so for each, where a set of Python numbers takes a hundred."""

import numpy as np
import xxhash

RECENT = 1 << 14


class Seen:
    """Hashes of 64 bits: two of n different contents are taken for equal with a chance of n²/2⁶⁵, 3e-6 for ten million."""

    def __init__(self) -> None:
        self._sorted = np.zeros(0, dtype=np.uint64)
        self._recent: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def add(self, *content: bytes) -> bool:
        """Remember some content, given in parts whose borders its length decides. False where it was met before."""
        hashed = xxhash.xxh3_64()
        for part in content:
            hashed.update(part)
        key = hashed.intdigest()
        if key in self._recent or self._holds(key):
            return False
        self._recent.add(key)
        if len(self._recent) > max(RECENT, len(self._sorted) // 16):
            recent = np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent))
            self._sorted = np.sort(np.concatenate([self._sorted, recent]))
            self._recent.clear()
        return True

    def _holds(self, key: int) -> bool:
        place = int(np.searchsorted(self._sorted, np.uint64(key)))
        return place < len(self._sorted) and int(self._sorted[place]) == key
