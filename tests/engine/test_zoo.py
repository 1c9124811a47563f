"""Models beyond LLMs on a CPU."""

from __future__ import annotations

import pytest
import torch
from benchmarks.zoo import ZOO, ZooModel

from tests.cases.zoo import check_zoo_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("model", ZOO, ids=lambda model: model.name)
@pytest.mark.parametrize(
    "arguments", [{"backend": "eager"}, {"backend": "inductor"}, {"frontend": "breakable"}], ids=str
)
def test_zoo_model(model: ZooModel, arguments: dict[str, str]) -> None:
    check_zoo_model(model, CPU, **arguments, options={"graph_device": "simulated"})


def test_bert_pads_the_batch_and_not_the_length() -> None:
    """Every token attends to every other: longer sequences are other results, more sequences are not."""
    fast = check_zoo_model(ZOO[0], CPU, backend="eager")
    with torch.no_grad():
        fast(input_ids=torch.randint(0, 100, (3, 9)))
    decisions = {d.subject: d.choice for d in fast._engine.plans[0].decisions}
    assert decisions == {"padding of batch": "allowed", "padding of length": "refused"}
