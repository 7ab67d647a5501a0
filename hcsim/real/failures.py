"""Translation of connection errors into messages for the users at both ends."""

from __future__ import annotations

import ssl

from hcsim.errors import ChannelBroken, ChannelError, PeerRefused, RemoteProtocolError

_RECORD_STARTS = {
    b"\x15\x03": "expects TLS, and we spoke plaintext to it",
    b"\x16\x03": "spoke TLS to a plaintext port",
}
"""How TLS looks to a peer that does not expect it: an alert, or the first message of a handshake."""
_SAME_PHRASE = (
    "join both to one cluster (`hcsim cluster invite` on a member, `hcsim cluster join` on the other), or give both "
    "certificates of one authority"
)
_CLOCKS = "are the clocks of both machines right?"

_EXPIRED, _NOT_YET_VALID = 10, 9
_UNKNOWN_AUTHORITY = (2, 7, 18, 19, 20, 21)
"""X509_V_ERR_…: no issuer found, an invalid signature, a self-signed certificate, and similar errors."""

PLAINTEXT = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "HTTPS_PROXY_REQUEST",
    "PACKET_LENGTH_TOO_LONG",
    "BAD_RECORD_TYPE",
)
"""OpenSSL's reasons for input that is not TLS."""
_OLD_TLS = ("UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW", "NO_PROTOCOLS_AVAILABLE")
_ALERTS = {
    "UNKNOWN_CA": f"its authority did not sign our certificate: {_SAME_PHRASE}",
    "DECRYPT_ERROR": f"its authority did not sign our certificate: {_SAME_PHRASE}",
    "CERTIFICATE_EXPIRED": f"our certificate has expired: {_CLOCKS}",
    "BAD_CERTIFICATE": f"our certificate is not valid there: {_CLOCKS}",
    "CERTIFICATE_UNKNOWN": "our certificate is not valid there",
    "CERTIFICATE_REQUIRED": "it wants a certificate, and we showed none",
    "PROTOCOL_VERSION": "it speaks another version of TLS; hcsim needs 1.3",
}


_ABOUT_CERTIFICATES = tuple(alert for alert in _ALERTS if alert != "PROTOCOL_VERSION")


class HandshakeCut(ConnectionResetError):
    """The connection ended in the middle of the TLS handshake."""

    def __init__(self, *, theirs: bool) -> None:
        super().__init__()
        self.theirs = theirs
        """Whether the peer had dialled, and so knew that this end expects TLS."""


def translated(error: OSError, peer: str) -> ChannelError:
    """Return the `ChannelError` that an error of the operating system or of OpenSSL means for the channel to `peer`."""
    if isinstance(error, ssl.SSLError):
        return _tls_failure(error, peer)
    if isinstance(error, HandshakeCut):
        doubt = "" if error.theirs else ": does it expect plaintext?"
        return ChannelBroken(f"{peer} ended the connection during the TLS handshake{doubt}", peer)
    if isinstance(error, ConnectionRefusedError):
        return PeerRefused(f"nobody listens at {peer}", peer)
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return ChannelBroken(f"{peer} reset the connection", peer)
    return ChannelBroken(f"the connection to {peer} failed: {error.strerror or str(error) or 'no answer'}", peer)


def is_distrust(error: OSError) -> bool:
    """Return whether one side rejects the other's certificate; further attempts are then useless."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    return isinstance(error, ssl.SSLError) and (error.reason or "").rpartition("ALERT_")[2] in _ABOUT_CERTIFICATES


def _tls_failure(error: ssl.SSLError, peer: str) -> ChannelError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return PeerRefused(f"we refused {peer}: {_what_is_wrong(error)}", peer)
    reason = error.reason or str(error)
    if "ALERT" in reason:
        alert = reason.rpartition("ALERT_")[2]
        why = _ALERTS.get(alert, alert.replace("_", " ").lower())
        return PeerRefused(f"{peer} refused the TLS connection: {why}", peer)
    if reason in PLAINTEXT:
        return RemoteProtocolError(f"{peer} speaks plaintext where TLS is needed: secure both ends or none", peer)
    if reason in _OLD_TLS:
        return PeerRefused(f"we refused {peer}: it does not speak TLS 1.3", peer)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return PeerRefused(f"we refused {peer}: it showed no certificate", peer)
    return ChannelBroken(f"TLS with {peer} failed: {reason.replace('_', ' ').lower()}", peer)


def unexpected_tls(received: bytes, peer: str) -> RemoteProtocolError | None:
    """Return an error if TLS was received where a frame should begin, or None."""
    what = _RECORD_STARTS.get(received[:2])
    return RemoteProtocolError(f"{peer} {what}: secure both ends or none", peer) if what else None


def _what_is_wrong(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == _EXPIRED:
        return f"its certificate has expired: {_CLOCKS}"
    if error.verify_code == _NOT_YET_VALID:
        return f"its certificate is not valid yet: {_CLOCKS}"
    if error.verify_code in _UNKNOWN_AUTHORITY:
        return f"our authority did not sign its certificate: {_SAME_PHRASE}"
    return f"its certificate is not valid: {error.verify_message}"


def fresh(error: ChannelError) -> ChannelError:
    """Return a copy of an error: one exception object raised in several tasks would mix their tracebacks."""
    return type(error)(str(error), error.peer)
