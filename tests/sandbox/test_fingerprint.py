"""Fingerprints see every element, in pieces, and both parts of complex numbers."""

import sys

import pytest
import torch
from torch import nn

from lightning_3d.sandbox import fingerprint as fingerprints
from lightning_3d.sandbox.fingerprint import differ, fingerprint, grad_print, sums
from lightning_3d.sandbox.snapshot import changed, marks


def test_sums_in_pieces_are_those_of_the_whole(monkeypatch):
    values = torch.arange(1000.0).sub(300)
    whole = sums(values)
    flat = values.double()
    torch.testing.assert_close(whole, torch.stack([flat.abs().sum(), flat.sum(), flat[::3].sum(), flat[::7].sum()]))
    monkeypatch.setattr(sys.modules[fingerprint.__module__], "_PIECE", 42)
    torch.testing.assert_close(sums(values), whole)


@pytest.mark.parametrize("changed", [0, 999])
def test_one_element_is_seen(changed):
    values = torch.ones(1000)
    other = values.clone()
    other[changed] += 1
    assert differ(fingerprint(values), fingerprint(other))
    assert grad_print(values) != grad_print(other)


def test_a_number_that_moves_within_a_buffer_is_seen():
    """Through `.data`, which torch does not count. Sums of all elements stay the same."""
    module = nn.Module()
    module.register_buffer("queue", torch.tensor([0.0, 1.0, 0.0, 0.0]))
    module.register_buffer("graph", torch.eye(2).to_sparse())
    before = marks(module, ["queue", "graph"])
    assert changed(module, before) == ()
    module.queue.data.copy_(torch.tensor([0.0, 0.0, 1.0, 0.0]))
    assert changed(module, before) == ("queue",)


def test_complex_numbers_count_with_both_parts():
    values = torch.complex(torch.ones(5), torch.arange(5.0))
    assert differ(fingerprint(values), fingerprint(values.conj()))
    assert grad_print(values)[0] == 15.0
    assert fingerprint(torch.zeros(0)) == [[0.0, 0.0, 0.0, 0.0]]


def test_a_dry_run_sums_one_piece(monkeypatch):
    """The gradients of 70 billion parameters have thousands of pieces, on every simulated rank."""
    monkeypatch.setattr(fingerprints, "has_peers", lambda: False)
    many = torch.arange(4.0 * fingerprints._PIECE)
    assert torch.equal(sums(many), sums(many[: fingerprints._PIECE]))


class Named(torch.Tensor):
    """Has a name for each row, which some slices lose (MONAI)."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise ValueError("no names")


def test_a_class_of_tensors_is_summed_as_a_plain_one():
    x = torch.randn(10)
    assert sums(x.as_subclass(Named)).equal(sums(x))
