"""The base of every settings class. Each stage declares its own fields beside the code that uses them."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Immutable, and an unknown key is an error (`draftsmith.config` turns it into one line with the nearest valid key)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
