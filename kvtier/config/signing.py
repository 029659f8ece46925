"""Settings of signed namespaces."""

import os
import stat
from pathlib import Path

from pydantic import BaseModel

from kvtier.config.types import FROZEN, SecretPath
from kvtier.errors import ConfigError
from kvtier.format.signing import SECRET_BYTES_MIN, Signer

KEY = "signing.key_file"
SECRET_BYTES_MAX = 4096


class SigningSettings(BaseModel):
    """key_file: holds the secret that all engines of a deployment have; only they can then store KV that they load.
    None: records are not signed."""

    model_config = FROZEN
    key_file: SecretPath | None = None

    def signer(self) -> Signer | None:
        """Return the signer; None if nothing is signed. Raises ConfigError, without the secret in it."""
        return None if self.key_file is None else Signer(_secret(self.key_file))


def _secret(path: Path) -> bytes:
    """Return the file's bytes, without line breaks at its end."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(SECRET_BYTES_MAX + 1).rstrip(b"\r\n") if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise ConfigError(KEY, str(path), f"no secret can be read there: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(KEY, str(path), "it is not a plain file: name one with the secret")
    if status.st_mode & 0o077:
        raise ConfigError(KEY, str(path), f"others can read or write it: chmod 600 {path}, and make another secret")
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(KEY, str(path), "it is another user's: it must be this user's, or root's")
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        fix = f"a secret has {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes; make one with `openssl rand -hex 32`"
        raise ConfigError(KEY, str(path), fix)
    return secret
