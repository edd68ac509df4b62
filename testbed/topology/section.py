"""Base of every section of a topology file: a mapping with known keys, immutable once it is read."""

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """A mapping of the file. Unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# `serving:` with everything below it commented out is an empty section, not a mistake.
nothing_is_empty = BeforeValidator(lambda value: {} if value is None else value)
