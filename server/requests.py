"""Bodies and parameters of the admin service. Unknown names are refused with the valid ones, and no value in a body is
converted: "5" is no number."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, JsonValue, Tag, model_validator
from pydantic_core import PydanticCustomError

from kvtier.admin.answers import HexId
from kvtier.admin.change import PIN_KEYS_MAX, PIN_LABEL_CHARS_MAX
from kvtier.admin.lookup import TOKENS_MAX
from kvtier.config.capacity import TENANT_BYTES_MAX
from kvtier.config.types import REQUEST_SECONDS_MAX

BYTES_MAX = 1 << 53  # largest integer that a JSON number holds exactly
_SPACE = "73d5c1a90e2f44b68a11c09b27de5f03"


NAMES_SHOWN_MAX = 5  # unknown names that an answer repeats
NAME_CHARS_MAX = 50  # of each of them, characters


class Named(BaseModel):
    """Values by name; other names are refused."""

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, values: object) -> object:
        valid = ", ".join(cls.model_fields)
        if not isinstance(values, dict | cls):
            text = "it must be an object with names and values; valid names: {valid}"
            raise PydanticCustomError("no_object", text, {"valid": valid})
        unknown = [str(name) for name in values if name not in cls.model_fields] if isinstance(values, dict) else []
        if unknown:
            names = ", ".join(name[:NAME_CHARS_MAX] for name in unknown[:NAMES_SHOWN_MAX])
            context = {"names": names, "valid": valid}
            raise PydanticCustomError("unknown_name", "unknown: {names}; valid names: {valid}", context)
        return values


def _request(*examples: dict[str, JsonValue]) -> ConfigDict:
    return ConfigDict(frozen=True, extra="forbid", strict=True, json_schema_extra={"examples": list(examples)})


def _whole(value: object) -> object:
    """Convert 3.0 to 3: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_whole(values: object) -> object:
    if isinstance(values, list) and any(type(value) is float for value in values):
        return [_whole(value) for value in values]
    return values


Tokens = Annotated[
    list[Annotated[int, Field(ge=0, lt=1 << 32)]],
    Field(max_length=TOKENS_MAX, fail_fast=True),  # a complaint about each of a million tokens took 2 GB and 8 s
    BeforeValidator(_all_whole),
]
Salt = Annotated[str, Field(max_length=1024, description='as requests bring it; "": none')]
Bytes = Annotated[int, Field(ge=0, le=BYTES_MAX), BeforeValidator(_whole)]
Seconds = Annotated[float, Field(gt=0, le=REQUEST_SECONDS_MAX, allow_inf_nan=False)]
Tenant = Annotated[
    str, Field(max_length=TENANT_BYTES_MAX, description='a label from the settings; "": everybody without one')
]


class TokensToLookUp(Named):
    """Token ids of a prompt. namespace null: all namespaces."""

    model_config = _request(
        {"tokens": [128000, 791, 6864, 315, 9822, 374]},
        {"tokens": [128000, 791], "cache_salt": "search-17", "namespace": _SPACE},
    )
    tokens: Tokens
    cache_salt: Salt = ""
    namespace: HexId | None = None


class TextToLookUp(Named):
    """A prompt's text, if the service's machine has the engines' tokenizer."""

    model_config = _request({"prompt": "The capital of France is"})
    prompt: Annotated[str, Field(max_length=1 << 22)]
    cache_salt: Salt = ""
    namespace: HexId | None = None


def _kind(asked: object) -> str:
    """Return the type of a lookup; text only without a list of tokens, so that errors name one of the two."""
    is_text = isinstance(asked, dict) and "prompt" in asked
    return (TextToLookUp if is_text else TokensToLookUp).__name__


ToLookUp = Annotated[
    Annotated[TokensToLookUp, Tag(TokensToLookUp.__name__)] | Annotated[TextToLookUp, Tag(TextToLookUp.__name__)],
    Discriminator(_kind),
]


class PromptPrefix(Named):
    """A prompt's first whole chunks."""

    model_config = _request({"namespace": _SPACE, "tokens": [128000, 791, 6864, 315, 9822, 374]})
    namespace: HexId
    tokens: Tokens
    cache_salt: Salt = ""


class Eviction(Named):
    """Segment sets to evict: those that meet all given conditions. n_bytes: no more sets than make up so many bytes,
    the least recently used first. unused_s: sets not used for so long. prefix: sets with a part of it (they hold other
    prompts too, and are evicted whole). Sets that a living engine fills, and pinned ones, stay; the answer counts them
    as `kept`."""

    model_config = _request({"n_bytes": 1 << 40}, {"unused_s": 604_800, "tenant": "search", "dry_run": False})
    n_bytes: Bytes | None = None
    unused_s: Seconds | None = None
    namespace: HexId | None = None
    tenant: Tenant | None = None
    prefix: PromptPrefix | None = None
    dry_run: bool = True


class Clearing(Named):
    """Selects all segment sets of a namespace, or of all. Sets that a living engine fills stay."""

    model_config = _request({"namespace": _SPACE}, {"namespace": _SPACE, "include_pinned": True, "dry_run": False})
    namespace: HexId | None = None
    include_pinned: bool = False
    dry_run: bool = True


class PinRequest(Named):
    """Pin that protects a namespace, or a prefix in it, from eviction. The prefix is given by tokens or by the keys of
    its chunks. expires_in_s null: until it is removed."""

    model_config = _request(
        {"namespace": _SPACE, "label": "everything of this model"},
        {"namespace": _SPACE, "keys": [_SPACE[::-1]], "label": "system prompt", "expires_in_s": 86_400},
    )
    namespace: HexId
    tokens: Tokens | None = None
    keys: Annotated[list[HexId], Field(min_length=1, max_length=PIN_KEYS_MAX)] | None = None
    cache_salt: Salt = ""
    label: Annotated[str, Field(max_length=PIN_LABEL_CHARS_MAX)] = ""
    expires_in_s: Seconds | None = None


class Quota(Named):
    """quota_bytes null: unlimited, whatever the settings say; 0: none. Otherwise a segment set must fit."""

    model_config = _request({"quota_bytes": 500 << 30})
    quota_bytes: Bytes | None
