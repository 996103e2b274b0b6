"""Where boto3 would take credentials from, by name: no value is read out, nothing is asked over the network.

Neighbours: `report.py` asks. boto3's order is followed, since asking boto3 itself would run programs, assume roles and
wait for a metadata service; `tests/cli/test_credentials.py` holds it to boto3's own answer.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raydz.cli.finding import Finding, State

_REMEDY = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"
_MACHINE = "the role of this machine, if it has one (nothing is in the environment or in files)"
Profile = Mapping[str, str]


@dataclass(frozen=True)
class _Files:
    """What the two files of AWS's tools hold about one profile; None where a file or the profile in it is missing."""

    profile: str
    credentials: Profile | None
    config: Profile | None


def credentials(environment: Mapping[str, str], home: Path) -> Finding:
    """The first source in boto3's order that would give credentials."""
    if environment.get("AWS_ACCESS_KEY_ID"):
        return _from_environment(environment)
    try:
        files = _read_files(environment, home)
    except (configparser.Error, UnicodeDecodeError):
        # the parser's own message quotes the line
        return _finding("broken", "a file of profiles cannot be parsed", "look at ~/.aws/config and ~/.aws/credentials")
    is_named = bool(environment.get("AWS_DEFAULT_PROFILE") or environment.get("AWS_PROFILE"))
    if is_named and files.credentials is None and files.config is None:
        remedy = "correct AWS_PROFILE, or add the profile to ~/.aws/config"
        return _finding("broken", f"profile {files.profile} does not exist", remedy)
    source = _from_profile(files, environment) or _from_surroundings(environment)
    if source is None:
        return _finding("odd", "no credentials in the environment or in files", _REMEDY)
    state: State = "absent" if source is _MACHINE else "ok"
    return _finding(state, f"credentials: {source}")


def _from_environment(environment: Mapping[str, str]) -> Finding:
    if not environment.get("AWS_SECRET_ACCESS_KEY"):
        return _finding("broken", "AWS_ACCESS_KEY_ID is set, AWS_SECRET_ACCESS_KEY is not", "set both, or neither")
    token = " and AWS_SESSION_TOKEN" if environment.get("AWS_SESSION_TOKEN") else ""
    return _finding("ok", f"credentials: environment (AWS_ACCESS_KEY_ID{token})")


def _read_files(environment: Mapping[str, str], home: Path) -> _Files:
    profile = environment.get("AWS_DEFAULT_PROFILE") or environment.get("AWS_PROFILE") or "default"
    keys = _parse(environment.get("AWS_SHARED_CREDENTIALS_FILE"), home, "credentials")
    config = _parse(environment.get("AWS_CONFIG_FILE"), home, "config")
    section = "default" if profile == "default" else f"profile {profile}"
    return _Files(profile, keys.get(profile), config.get(section))


def _parse(given: str | None, home: Path, name: str) -> dict[str, Profile]:
    path = home / ".aws" / name if given is None else Path(given.replace("~", str(home), 1))
    if not path.is_file():
        return {}
    parser = configparser.RawConfigParser(strict=False, default_section="")
    parser.read_string(path.read_text())
    return {section: dict(parser.items(section)) for section in parser.sections()}


def _from_profile(files: _Files, environment: Mapping[str, str]) -> str | None:
    """boto3's order: assumed role, web identity, single sign-on, keys, console login, a program, keys in the config."""
    config, keys = files.config or {}, files.credentials or {}
    both = {**keys, **config}
    if "role_arn" in both and "web_identity_token_file" not in both:
        return f"a role that profile {files.profile} assumes"
    if "web_identity_token_file" in both or environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return "a role by web identity (the token file of this pod)"
    if "sso_start_url" in both or "sso_session" in both:
        return f"single sign-on of profile {files.profile}"
    if "aws_access_key_id" in keys:
        return f"profile {files.profile} of the credentials file"
    if "login_session" in both:
        return f"console login of profile {files.profile}"
    if "credential_process" in both:
        return f"the program that profile {files.profile} names"
    if "aws_access_key_id" in config:
        return f"profile {files.profile} of the config file"
    return None


def _from_surroundings(environment: Mapping[str, str]) -> str | None:
    if any(environment.get(f"AWS_CONTAINER_CREDENTIALS_{kind}_URI") for kind in ("RELATIVE", "FULL")):
        return "the role of this container"
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    return _MACHINE


def _finding(state: State, detail: str, remedy: str | None = None) -> Finding:
    tried = "" if state == "broken" else "; no bucket was tried (--s3)"
    return Finding("s3", state, detail + tried, remedy)
