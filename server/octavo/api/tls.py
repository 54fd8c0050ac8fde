"""TLS of the public port: each connection gets the certificate that lies on the disk when it begins."""

from __future__ import annotations

import logging
import os
import ssl
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError

_log = logging.getLogger("octavo.api")


class RenewedContext(ssl.SSLContext):
    """Reads its files anew where they have changed: whoever renews a certificate, as cert-manager, replaces
    it in place. One that cannot be used leaves the one before in service.
    """

    def __new__(cls, config: EngineConfig) -> RenewedContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, config: EngineConfig) -> None:
        """Raises ``OSError`` for files that cannot be used."""
        self._config = config
        self._seen = self._versions()
        self._current = self._read()

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """A connection begins."""
        if (found := self._versions()) != self._seen:
            self._seen = found
            try:
                self._current = self._read()
                _log.info("the certificate was read anew")
            except OSError as error:
                _log.warning("%s; the one before is used", _unusable(self._config, error))
        return self._current.wrap_bio(*args, **options)

    def _versions(self) -> list[tuple[int, int, int] | None]:
        files = self._config.ssl_certfile, self._config.ssl_keyfile, self._config.ssl_ca_certs
        return [_version(file) for file in files if file is not None]

    def _read(self) -> ssl.SSLContext:
        config, context = self._config, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        assert config.ssl_certfile is not None
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
        return context


def tls_context(config: EngineConfig) -> RenewedContext | None:
    """None without a certificate. Raises ``ConfigError`` for one that cannot be used."""
    if config.ssl_certfile is None:
        return None
    try:
        return RenewedContext(config)
    except OSError as error:
        raise ConfigError(_unusable(config, error)) from error


def _version(file: str) -> tuple[int, int, int] | None:
    """Another one where the file has become another; None where there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _unusable(config: EngineConfig, error: OSError) -> str:  # ssl.SSLError is one
    return f"the certificate in ssl-certfile {config.ssl_certfile} cannot be used: {error}"
