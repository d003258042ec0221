"""What is a secret by its name, such as ``api_key``, or by its look: such values are kept out of files that others may read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["SECRET_VARIABLE", "has_secrets", "without_secrets"]

SECRET_VARIABLE: Final = "HETERODYNE_RUN_SECRET"
"""Has what the workers of a run know each other by."""

LEFT_OUT: Final = "(left out: a secret by its name)"

_NAME: Final = re.compile(
    r"(?:.*(?:[_.-]|[a-z](?=[A-Z])|(?i:api|auth|access|private|secret)))?"
    r"(?i:keys?|tokens?|secrets?|passwords?|passwd|pwd|pw|passphrase|credentials?|creds|auth|authorization|bearer|cookies?|dsn|jwt|otp"
    r"|pat|pem|sas|webhook|connection_string|conn_str)"
)
_OF_NUMBERS_TOO: Final = re.compile(r".*(?:secret|pass|credential).*", re.IGNORECASE)
# Of tokenizers: what their tokens look like.
_NO_SECRET: Final = re.compile(
    r"(?:.*_)?(?:pad|eos|bos|unk|sep|cls|mask|image|special|start|end)_tokens?|keys?|tokens", re.IGNORECASE
)
_VALUES: Final = re.compile(
    r"(?<=://)[^/@\s]+:[^/@\s]+(?=@)"  # user and password of a URL
    r"|(?<=[?&])(?:[\w-]*(?:key|token|secret|password|sig|signature))=[^&\s]+"  # of its query
    r"|\b(?:sk-|gh[opsu]_|github_pat_|hf_|xox[abpr]-|glpat-|AKIA)[A-Za-z0-9_-]{8,}"  # as services make them
    r"|\beyJ[\w-]+\.[\w-]+\.[\w-]+"  # a JSON web token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*",
    re.DOTALL,
)


def without_secrets(value: Any) -> Any:
    """The same nested mappings and lists, with `LEFT_OUT` for texts and numbers under the name of a secret, and in place of what looks
    like one in any text: user and password of a URL, keys as services make them, a private key."""
    if isinstance(value, Mapping):
        named = any(_is_secret(value.get(key)) for key in ("name", "key"))  # {name: API_KEY, value: ...}
        return {
            key: _covered(inner, str(key)) if _is_secret(key) or (named and key == "value") else without_secrets(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(inner) for inner in value]
    return _VALUES.sub(LEFT_OUT, value) if isinstance(value, str) else value


def has_secrets(value: Any) -> bool:
    """Return whether `without_secrets` leaves out anything."""
    plain = without_secrets(value)
    return bool(plain != _lists(value))


def _is_secret(key: object) -> bool:
    return isinstance(key, str) and _NAME.fullmatch(key) is not None and _NO_SECRET.fullmatch(key) is None


def _covered(value: Any, name: str) -> Any:
    """All texts of it, for below such a name there may be several; numbers where they may be a password, and no size or id."""
    if isinstance(value, Mapping):
        return {key: _covered(inner, name) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_covered(inner, name) for inner in value]
    number = isinstance(value, int | float) and not isinstance(value, bool) and _OF_NUMBERS_TOO.fullmatch(name)
    return LEFT_OUT if number or (isinstance(value, str) and value) else value


def _lists(value: Any) -> Any:
    """With lists for tuples, as `without_secrets` returns them."""
    if isinstance(value, Mapping):
        return {key: _lists(inner) for key, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, list | tuple) else value
