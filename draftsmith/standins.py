"""TEMPORARY stand-ins of settings classes whose modules are being written. To be removed."""

from draftsmith.settings import Settings


class ScratchSettings(Settings):
    vocabulary: int = 4096
    width: int = 256
    blocks: int = 8
    steps: int = 600
