"""What a store means by an error: it is full, it does not let us in, a clock is wrong; and what to do about it."""

import errno
from collections.abc import Iterator

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FULL_CODES = frozenset(
    {"InsufficientStorage", "InsufficientStorageSpace", "QuotaExceeded", "XMinioStorageFull", "507"}
)
_CLOCK_CODES = frozenset({"RequestTimeTooSkewed", "RequestExpired", "ExpiredPresignRequest"})
_FORBIDDEN_CODES = frozenset(
    {"AccessDenied", "ExpiredToken", "Forbidden", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "403"}
)
_NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"})


def refusal(error: BaseException) -> str | None:
    """Why the store refused a call for good, and the next step; None for any other failure.

    A call that was refused has changed nothing. fsspec's drivers turn answers of object stores into `OSError`s and keep
    the answer as their cause.
    """
    chain = list(_chain(error))
    codes = {code for link in chain for code in _codes(link)}
    if codes & _CLOCK_CODES:
        return f"{error}; the clock of this machine differs from the store's: set it (NTP)"
    if codes & _FULL_CODES or any(isinstance(link, OSError) and link.errno in _FULL for link in chain):
        return f"{error}; the store is full: free space there (`midflight prune`), or raise its quota"
    denied = any(isinstance(link, PermissionError) or type(link).__name__ in _NO_CREDENTIALS for link in chain)
    if denied or codes & _FORBIDDEN_CODES:
        return (
            f"{error}; the store does not let us in: check its permissions and the credentials in the environment "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or in fsspec's configuration"
        )
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _codes(error: BaseException) -> set[str]:
    """The codes in an answer of an object store, as botocore keeps it."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return set()
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return {str(response.get("Error", {}).get("Code")), str(status)}
