"""NCCL's topology XML (`NCCL_TOPO_DUMP_FILE`, or what clouds ship): the PCIe tree of a node with its GPUs and NICs.

>>> found = read('''<system version="1"><cpu numaid="0">
...   <pci busid="0000:10:00.0" class="0x060400"><pci busid="0000:11:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/>
...   <pci busid="0000:12:00.0" class="0x020700" link_speed="16 GT/s" link_width="16"/></pci></cpu></system>''')
>>> [(g.busid, g.socket, g.switch) for g in found.gpus], found.nics[0].switch, round(found.gpus[0].pcie_bytes_per_s / 1e9, 1)
([('0000:11:00.0', 0, '0000:10:00.0')], '0000:10:00.0', 31.5)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from ir.errors import InputError

GPU_CLASS, NIC_CLASSES = "0x0302", ("0x0200", "0x0207")
ENCODED = 128 / 130
"""Data of a PCIe symbol from the third generation on."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU or a NIC: where it is plugged in. `switch` is the PCIe switch above it, or nothing; `nvlinks` how many NVLinks leave it; `gbit_per_s` of a NIC."""

    busid: str
    socket: int
    switch: str
    pcie_bytes_per_s: float
    nvlinks: int = 0
    gbit_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Tree:
    """The cards of a node in the file's order."""

    gpus: tuple[Card, ...]
    nics: tuple[Card, ...]
    num_sockets: int


def looks_like(text: str) -> bool:
    """Whether this is such a file, or the graph that NCCL writes beside it."""
    return "<system" in text[:2000] or "<graphs" in text[:2000]


def read(text: str) -> Tree:
    """The tree of a file; InputError where it is no XML or holds NCCL's graphs, which say how it searched and not what is there."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise InputError(f"no XML, or cut short: {error}") from error
    if root.tag != "system":
        raise InputError(f"`<{root.tag}>` is NCCL's search, not its topology: give the file of NCCL_TOPO_DUMP_FILE")
    cards = [found for i, cpu in enumerate(root.iter("cpu")) for found in _cards(cpu, int(cpu.get("numaid") or i), "")]
    gpus = tuple(card for kind, card in cards if kind == "gpu")
    nics = tuple(card for kind, card in cards if kind == "nic")
    return Tree(gpus, nics, len(list(root.iter("cpu"))))


def _cards(parent: ElementTree.Element, socket: int, switch: str) -> Iterator[tuple[str, Card]]:
    for pci in parent.findall("pci"):
        busid, kind, rate = pci.get("busid", ""), pci.get("class", ""), _rate(pci.get("link_speed", ""), pci.get("link_width", ""))
        nets = list(pci.iter("net"))
        if kind.startswith(GPU_CLASS):
            links = sum(int(link.get("count", "0")) for link in pci.iter("nvlink"))
            yield "gpu", Card(busid, socket, switch, rate, links)
        elif kind.startswith(NIC_CLASSES) or (nets and not pci.findall("pci")):
            yield "nic", Card(busid, socket, switch, rate, 0, sum(float(net.get("speed", "0")) for net in nets) / 1000)
        else:
            yield from _cards(pci, socket, busid)
    for nic in parent.findall("nic"):
        for net in nic.findall("net"):
            yield "nic", Card(net.get("name", ""), socket, switch, 0.0, 0, float(net.get("speed", "0")) / 1000)


def _rate(speed: str, width: str) -> float:
    """Bytes a second of a link; 0 where the file does not say."""
    found = re.match(r"([\d.]+) ?GT/s", speed)
    return float(found[1]) * 1e9 / 8 * ENCODED * int(width) if found and width.isdigit() else 0.0
