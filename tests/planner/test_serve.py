"""Devices that serve a model."""

import pytest

from lightning_3d.cli import main
from lightning_3d.errors import PlannerError
from lightning_3d.tools.planner.catalogue import Catalogue
from lightning_3d.tools.planner.model_names import named_model
from lightning_3d.tools.planner.serve import Serving

CATALOGUE = Catalogue.load()


def asked(name="llama3-70b", device="h100", **changes):
    given = {"precision": "bf16-true", "users": 1000, "context": 4096, "rate": 20.0, **changes}
    return Serving(model=named_model(name), device=CATALOGUE.find(device), **given)


def test_a_cache_is_keys_and_values_of_all_layers():
    assert asked().cache == 2 * 80 * 1024 * 2 * 4096
    assert asked().weights == pytest.approx(70.55e9 * 2, rel=1e-3)


def test_a_copy_has_room_and_is_fast_enough():
    found = asked()
    size, users, copies = found.answer()
    assert size * (80 - 1.5) * 1e9 >= found.weights + users * found.cache
    assert found.tokens_per_second(size, users) >= users * 20
    assert copies * users >= 1000 > (copies - 1) * users
    for other in found.groups():
        fitted = found.users_of(other)
        assert not fitted or other * -(-1000 // fitted) >= size * copies


def test_tokens_are_bound_by_memory_for_few_users_and_by_products_for_many():
    found = asked("llama3-8b", context=128)
    one = found.tokens_per_second(1, 1)
    assert one == pytest.approx(3350e9 / (found.weights + found.cache))
    assert found.tokens_per_second(1, 5000) < 0.5 * 5000 * one


def test_what_cannot_be_served_is_refused():
    with pytest.raises(PlannerError, match="cannot be served"):
        asked("llama3-405b", "t4").answer()
    with pytest.raises(PlannerError, match="--users 0 must be above 0"):
        asked(users=0)


def test_the_command_shows_the_formula(capsys):
    assert (
        main(["plan", "llama3-70b", "--serve", "--accelerator", "h100", "--users", "100", "--precision", "bf16-true"])
        == 0
    )
    text = capsys.readouterr().out
    assert "2 x 80 layers x 1024 x 2 bytes x 8,192 tokens = 2.68 GB" in text
    assert "weights: 70,553,706,496 x 2 bytes = 141 GB" in text
