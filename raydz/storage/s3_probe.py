"""What of a run's transfers only S3 has: a checksum that is compared, an upload in parts, and one that is aborted.

Neighbours: `s3.S3Store.probe_writable` calls `probe_transfers` after the checks that every store gets.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import Any

from raydz.errors import StorageError
from raydz.storage.probe import ABORTS, CHECKSUMS
from raydz.storage.s3_checksum import Checksum
from raydz.storage.s3_client import S3Connection
from raydz.storage.s3_errors import s3_errors
from raydz.storage.s3_put import S3Put
from raydz.storage.s3_reader import S3Reader
from raydz.storage.s3_writer import Upload
from raydz.storage.store import Names

_BODY = b"raydz uploads"
_DAMAGED = ("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "InvalidRequest")


def probe_transfers(connection: S3Connection, bucket: str, root: str) -> Names:
    """Weaknesses of the store's uploads.

    Raises:
        StorageError: an upload in parts fails or returns other bytes, so that nothing large can be written.
    """
    target = {"Bucket": bucket, "Key": f"{root}raydz-probe-{uuid.uuid4().hex}"}
    weaknesses = []
    try:
        if not _refuses_damage(connection, target):
            weaknesses.append(CHECKSUMS)
        _check_upload(connection, target)
        if not _lets_go(connection, target):
            weaknesses.append(ABORTS)
    except BaseException:
        with suppress(StorageError):  # must not hide the cause
            _delete(connection, target)
        raise
    _delete(connection, target)
    return weaknesses


def _refuses_damage(connection: S3Connection, target: dict[str, Any]) -> bool:
    """Whether a body is refused whose checksum, of the kind that uploads send, is a wrong one."""
    if connection.options.checksum == "off":
        return False
    checksum = connection.checksum or Checksum("crc32")
    wrong = checksum.value(0)
    with s3_errors(_uri(target)):
        try:
            connection.client.put_object(**target, **connection.encryption, **wrong, Body=_BODY)
        except connection.client.exceptions.ClientError as error:
            if error.response["Error"]["Code"] in _DAMAGED:
                return True
            raise
    return False


def _check_upload(connection: S3Connection, target: dict[str, Any]) -> None:
    upload = Upload(connection, S3Put(connection, target["Bucket"], target["Key"]))
    try:
        upload.send(bytearray(_BODY))
        upload.complete()
    finally:
        upload.close()
    body = S3Reader(connection, target["Bucket"], target["Key"]).get(0, None, None)
    if body != _BODY:
        raise StorageError(
            "the store cannot be used: an upload in parts returned other bytes than were written",
            where=_uri(target), got=body[:64], wanted=_BODY,
        )  # fmt: skip


def _lets_go(connection: S3Connection, target: dict[str, Any]) -> bool:
    """Whether an upload that is aborted is gone; refusals of either request count as no."""
    client = connection.client
    with s3_errors(_uri(target)):
        upload = {**target, "UploadId": client.create_multipart_upload(**target, **connection.encryption)["UploadId"]}
        try:
            client.upload_part(**upload, PartNumber=1, Body=_BODY)
            client.abort_multipart_upload(**upload)
            left = client.list_multipart_uploads(Bucket=target["Bucket"], Prefix=target["Key"])
        except client.exceptions.ClientError:
            return False
    return not any(found["UploadId"] == upload["UploadId"] for found in left.get("Uploads", ()))


def _delete(connection: S3Connection, target: dict[str, Any]) -> None:
    with s3_errors(_uri(target)):
        connection.client.delete_object(**target)


def _uri(target: dict[str, Any]) -> str:
    return f"s3://{target['Bucket']}/{target['Key']}"
