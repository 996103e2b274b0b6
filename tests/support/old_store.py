"""A store of the kind that chokes on newer headers: a proxy before SeaweedFS that drops them and signs anew.

Neighbours: stands where `fault_proxy` stands, which breaks answers; this one makes the server deaf. `If-None-Match` is
ignored by rclone, s3rver and nanio, checksums by radosgw and moto.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.fault_proxy import FaultHandler, FaultProxy, fault_proxy
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY

CONDITIONS = ("if-none-match",)
CHECKSUMS = ("x-amz-checksum-", "x-amz-sdk-checksum-", "content-md5")

Damages = Callable[[str, str], bool]


@contextmanager
def old_store(upstream_url: str, *ignored: str, damages: Damages = lambda method, path: False) -> Iterator[FaultProxy]:
    """Run it.

    Args:
        ignored: beginnings of header names that the store does not know, in small letters.
        damages: (method, path) of requests whose body loses a bit before it is stored.
    """

    class OldStore(FaultHandler):
        def ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            if body and damages(self.command, self.path):
                body = body[:-1] + bytes([body[-1] ^ 1])
            kept = {n: v for n, v in self.headers.items() if not n.lower().startswith((*ignored, "authorization"))}
            signed = sign(self.command, f"{upstream_url}{self.path}", kept, body)
            for name in list(self.headers):
                del self.headers[name]
            for name, value in signed.items():
                self.headers[name] = value
            return super().ask(body)

    with fault_proxy(upstream_url, OldStore) as proxy:
        yield proxy


def sign(method: str, url: str, headers: dict[str, str], body: bytes) -> dict[str, str]:
    """The headers with a signature of their own, as boto3 makes it."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    own = {name: value for name, value in headers.items() if not name.lower().startswith(("x-amz-date", "connection"))}
    request = AWSRequest(method, url, headers=own, data=body)
    request.context["client_config"] = None
    S3SigV4Auth(Credentials(ACCESS_KEY, SECRET_KEY), "s3", "us-east-1").add_auth(request)
    return dict(request.headers.items())
