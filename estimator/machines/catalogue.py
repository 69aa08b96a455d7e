"""Find and load machine profiles by name, with the limits and networks that a person sets."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from estimator import files
from estimator.errors import MOST_QUOTED, ProfileError, UnknownMachineError, quoted
from estimator.files import home, parse_json, read_text, shipped_data
from estimator.machines.profile import LEAST, MOST, Device, Link, MachineProfile, Provenance
from estimator.units import format_bandwidth, parse_bandwidth_bytes_per_s

_LIMIT = re.compile(r"([1-9][0-9]{0,5}(?:\.[0-9]+)?)(W|MHz)")
_HZ_PER_MHZ = 1e6


def split_limit(name: str) -> tuple[str, str | None]:
    """(name of a machine, its limit) of a text such as ``h100-sxm@500W``.

    >>> split_limit("h100-sxm@500W"), split_limit("t4")
    (('h100-sxm', '500W'), ('t4', None))
    """
    machine, at, limit = name.partition("@")
    return (machine, limit) if at else (name, None)


def with_limit(profile: MachineProfile, limit: str) -> MachineProfile:
    """The machine under ``500W`` (nvidia-smi -pl) or ``1410MHz`` (nvidia-smi -lgc).

    A power limit lowers the clock that busy units hold (see `kernels.datasheet_model`), a clock the
    peaks themselves; memory keeps its rate. Raises ProfileError for a machine whose kernels were
    measured, and for a limit above what the device has.
    """
    match = _LIMIT.fullmatch(limit)
    if match is None:
        raise ProfileError(f"limit {quoted(limit)} is unknown; write one such as 500W or 1410MHz")
    if profile.kernels or profile.kind != "cuda":
        raise ProfileError(
            f"'{profile.name}' was measured as it runs; set the limit there and run 'estimator "
            "probe' again"
        )
    value = float(match[1])
    limited = _at_power if match[2] == "W" else _at_clock
    devices = tuple(limited(device, value) for device in profile.devices)
    return replace(profile, name=f"{profile.name}@{limit}", devices=devices)


def _at_power(device: Device, watts: float) -> Device:
    _check(device, "power_w", watts, "W")
    return replace(device, details={**device.details, "power_w": watts})


def _at_clock(device: Device, mhz: float) -> Device:
    clock_hz = mhz * _HZ_PER_MHZ
    boost_hz = _check(device, "boost_clock_hz", clock_hz, "Hz")
    tensor_hz = float(device.details.get("tensor_clock_hz") or boost_hz)
    peaks = {
        dtype: peak * min(clock_hz / (boost_hz if dtype == "float32" else tensor_hz), 1.0)
        for dtype, peak in device.peak_flops_per_s.items()
    }
    details = {**device.details, "boost_clock_hz": clock_hz}
    if "tensor_clock_hz" in details:
        details["tensor_clock_hz"] = min(clock_hz, tensor_hz)
    return replace(device, peak_flops_per_s=peaks, details=details)


def _check(device: Device, name: str, limit: float, unit: str) -> float:
    most = device.details.get(name)
    if not isinstance(most, int | float) or limit > most:
        has = f"{most:g} {unit}" if isinstance(most, int | float) else "no such figure"
        raise ProfileError(
            f"'{device.name}' is limited to {limit:g} {unit}, and its datasheet has {has}; choose "
            "a lower limit"
        )
    return float(most)


Kind = Literal["tcp", "roce", "infiniband"]

# Typical of a hop between nodes, as in the catalogue's entries.
_LATENCIES_S: dict[Kind, float] = {"tcp": 2.5e-5, "roce": 3e-6, "infiniband": 2e-6}


@dataclass(frozen=True, slots=True)
class GivenNetwork:
    """What a node sends to others, each way, and over what."""

    bytes_per_s: float
    kind: Kind = "tcp"

    @classmethod
    def parse(cls, text: str) -> GivenNetwork:
        """Read a rate, or a rate and a kind; raises ValueError.

        >>> GivenNetwork.parse("100Gbit/s"), GivenNetwork.parse("200 Gbit/s,infiniband").kind
        (GivenNetwork(bytes_per_s=12500000000.0, kind='tcp'), 'infiniband')
        """
        rate, _, wanted = text.partition(",")
        bytes_per_s = parse_bandwidth_bytes_per_s(rate)
        if not LEAST <= bytes_per_s <= MOST:
            raise ValueError(f"'{rate}' is no rate of a network; write one such as 100Gbit/s")
        for kind in _LATENCIES_S:
            if kind == (wanted.strip() or "tcp"):
                return cls(bytes_per_s, kind)
        raise ValueError(
            f"'{wanted.strip()}' is no kind of network; write one of {', '.join(_LATENCIES_S)}"
        )

    def of(self, machine: MachineProfile) -> MachineProfile:
        """The machine on this network instead of its own."""
        note = f"{format_bandwidth(self.bytes_per_s)} as given; latency is a typical value"
        link = Link(
            kind=self.kind,
            locality="rack",
            latency_s=_LATENCIES_S[self.kind],
            bandwidth_bytes_per_s=self.bytes_per_s,
            provenance=Provenance(source="datasheet", note=note),
        )
        hardware = {
            key: value
            for key, value in machine.hardware.items()
            if key not in ("nic_count", "nic_bit_per_s")
        }
        return replace(machine, network=(link,), hardware=hardware)


# (modification time, size, inode) of a file's last version, and what it held.
_FileState = tuple[int, int, int]
_loaded: dict[str, tuple[_FileState, MachineProfile]] = {}
_MOST_LOADED = 256
# What was asked for a moment ago, and until when its file is not looked at again: a scheduler's
# questions come by the thousand. What this process writes is seen at once.
_FRESH_S = 0.02
_fresh: dict[tuple[str, bool, str | None, int], tuple[float, MachineProfile]] = {}
_reading = threading.Lock()
_MOST_NAMED = 5


def machine_folders() -> tuple[Path, ...]:
    """Where machines are looked up by name: the user's store first, then the shipped catalogue."""
    return tuple(map(Path, _folder_names()))


def _folder_names() -> tuple[str, str]:
    # As text: every estimate asks whether its machines have changed, and paths are slow to join.
    chosen = os.environ.get("ESTIMATOR_HOME") or str(home())
    return f"{chosen}{os.sep}machines", str(shipped_data("machines"))


def known_machines() -> dict[str, Path]:
    """Every machine that can be named, with its file; the user's own hide shipped ones."""
    machine_paths: dict[str, Path] = {}
    for folder in machine_folders():
        paths = sorted(folder.glob("*.json"), key=lambda path: path.stem) if folder.is_dir() else ()
        for path in paths:
            machine_paths.setdefault(path.stem, path)
    return machine_paths


ReadAt = tuple[float, str | None]


def load_profile(name_or_path: str | os.PathLike[str]) -> MachineProfile:
    """Load a profile by machine name (user's store, then shipped catalogue) or by path.

    A name may end in a limit, as ``h100-sxm@500W`` or ``h100-sxm@1410MHz``. A file
    is read again only once it has changed, of which other processes' changes are seen after 20 ms.
    Raises UnknownMachineError if nothing goes by that name, ProfileError if the file is damaged or
    the limit is none of that machine.

    >>> load_profile("t4-g4dn").devices[0].name
    'NVIDIA T4'
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise UnknownMachineError(
            f"a machine is loaded by name or path, found {quoted(name_or_path)}; write one such as "
            "h100-sxm"
        )
    text = os.fspath(name_or_path)
    return _profile(text, is_path=os.sep in text or text.endswith(".json"))


def named_profile(name: str, at: ReadAt | None = None) -> MachineProfile:
    """Load a profile by machine name alone, with a limit or without, as `load_profile` does.

    Names that come from elsewhere, in an allocation or over the network, are no paths. Several are
    read faster at the same `read_at()`. Raises UnknownMachineError, ProfileError.
    """
    return _profile(name, is_path=False, at=at)


def read_at() -> ReadAt:
    """Now, and the user's store, by which profiles are known to be fresh."""
    return time.monotonic(), os.environ.get("ESTIMATOR_HOME")


def _profile(text: str, *, is_path: bool, at: ReadAt | None = None) -> MachineProfile:
    now, store = at or read_at()
    key = text, is_path, store, files.written
    fresh = _fresh.get(key)
    if fresh is not None and now < fresh[0]:
        return fresh[1]
    name, limit = (text, None) if is_path else split_limit(text)
    path, state = _find_profile(name, is_path=is_path)
    profile = _read_once(path, state, limit)
    if len(_fresh) >= _MOST_LOADED:
        _fresh.clear()
    _fresh[key] = now + _FRESH_S, profile
    return profile


def _read_once(path: str, state: _FileState | None, limit: str | None) -> MachineProfile:
    """Read a file that is not known in this state.

    Threads that ask at once get one object: what is compiled belongs to it.
    """
    key = path if limit is None else f"{path}@{limit}"
    with _reading:
        known = _loaded.get(key)
        if known is not None and known[0] == state:
            return known[1]
        profile = _read_profile(Path(path))
        if limit is not None:
            profile = with_limit(profile, limit)
        if state is not None:
            if len(_loaded) >= _MOST_LOADED:
                _loaded.clear()
            _loaded[key] = (state, profile)
        return profile


def _find_profile(text: str, *, is_path: bool) -> tuple[str, _FileState | None]:
    """(path, state) of a profile's file; the state is None where there is no such file."""
    if os.sep not in text:
        for folder in _folder_names():
            path = f"{folder}{os.sep}{text}.json"
            state = _file_state(path)
            if state is not None:
                return path, state
    if is_path:
        return text, _file_state(text)
    if text.startswith("local"):
        store = home()
        hint = "run 'estimator probe' first"
        if store.exists() and not store.is_dir():
            hint = f"ESTIMATOR_HOME is {store}, no folder: name one, then run 'estimator probe'"
    else:
        hint = _close_to(text)
    raise UnknownMachineError(f"no machine profile is called {quoted(text)}; {hint}")


def _close_to(text: str) -> str:
    """What to do about a name that no machine has: those it may have meant, at most five."""
    from difflib import get_close_matches

    known, wanted = list(known_machines()), text[:MOST_QUOTED].lower()
    within = [name for name in known if wanted and wanted in name]
    within.sort(key=lambda name: (not name.startswith(wanted), len(name)))
    alike = get_close_matches(wanted, known, n=_MOST_NAMED)
    close = list(dict.fromkeys([*within, *alike]))[:_MOST_NAMED]
    everything = "run 'estimator machines list' for all that are known"
    return f"names close to it: {', '.join(close)}; {everything}" if close else everything


def _file_state(path: str) -> _FileState | None:
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino


def _read_profile(path: Path) -> MachineProfile:
    try:
        content = read_text(path)
    except FileNotFoundError:
        raise UnknownMachineError(
            f"there is no profile file {path}; run 'estimator probe --out {path}'"
        ) from None
    except OSError as error:
        raise ProfileError(
            f"cannot read profile {path} ({error.strerror}); check the file, or run "
            "'estimator probe' to write a new one"
        ) from None
    try:
        data = parse_json(content)
    except ValueError as error:
        raise ProfileError(
            f"{path} is damaged ({error}); run 'estimator probe' to write a new one"
        ) from None
    # What JSON lets stand in a text of ASCII as it is can be printed, but for one character.
    is_printable = content.isascii() and not any(odd in content for odd in ("\\", "\x7f"))
    return MachineProfile.from_dict(data, origin=str(path), is_printable=is_printable)


def check_machine_name(name: str) -> str:
    """The name of a machine type, if it can stand in an allocation; raises ProfileError."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.\-]*", name):
        raise ProfileError(
            f"{quoted(name)} cannot stand in an allocation; use letters, digits, '.', '_' and '-'"
        )
    return name
