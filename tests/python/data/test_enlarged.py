"""Tests enlarged.py, which makes a minibatch as large as the largest one that is known to come."""

from __future__ import annotations

import torch
from pipedream import Microbatches
from pipedream.data.enlarged import enlarged, shaped
from pipedream.model.batches import Keywords, parts_of
from pipedream.planning.shapes import shapes_of_parts


def test_values_repeat_along_every_dimension_that_grows() -> None:
    inputs, targets = enlarged(
        torch.tensor([[1, 2]]), torch.tensor([7, 8]), {"inputs": (2, 3), "targets": (1,)}
    )
    assert inputs.tolist() == [[1, 2, 1], [1, 2, 1]]
    assert targets.tolist() == [7, 8]


def test_a_batch_of_keywords_stays_one_object_and_its_shared_tensors_one() -> None:
    tokens = torch.arange(2).reshape(1, 2)
    inputs, targets = enlarged(*parts_of({"input_ids": tokens, "labels": tokens}, 0), {"input_ids": (2, 2)})
    assert inputs is targets
    assert inputs["input_ids"] is inputs["labels"]
    assert inputs["input_ids"].shape == (2, 2)


def test_inputs_by_name_beside_own_targets_are_enlarged_by_the_shapes_of_both() -> None:
    batches = Microbatches((Keywords(x=torch.ones(2, length)), torch.ones(2)) for length in (3, 5))
    given = parts_of(batches, 0)
    for inputs, targets in (enlarged(*given, {}), enlarged(*given, shapes_of_parts(*given))):
        assert [tuple(each["x"].shape) for each in inputs] == [(2, 5)] * 2
        assert [len(each) for each in targets] == [2, 2]
    forwarded, _ = enlarged(Keywords(x=torch.ones(2, 3)), Keywords(x=torch.ones(2, 3)), {"x": (2, 4)})
    assert forwarded["x"].shape == (2, 4)


def test_what_the_shapes_do_not_fit_stays_the_same_object() -> None:
    image, empty, scale = torch.ones(2, 2), torch.ones(0, 2), torch.tensor(1.0)
    given = [image, {"empty": empty}, (scale, None, "text")]
    shapes = {"inputs[0]": (4, 4, 4), "inputs[1].empty": (3, 3), "labels": (9,)}
    found, _ = enlarged(given, None, shapes)
    assert found[0] is image and found[1]["empty"] is empty and found[2][0] is scale
    assert found[2][1:] == (None, "text")


def test_a_minibatch_of_just_these_shapes_is_cut_where_it_is_larger() -> None:
    inputs, targets = shaped(torch.tensor([[1, 2, 3]]), torch.tensor([7, 8]), {"inputs": (2, 2)})
    assert inputs.tolist() == [[1, 2], [1, 2]]
    assert targets.tolist() == [7, 8]


def test_an_enlarged_tensor_has_the_order_in_memory_that_it_had() -> None:
    images = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    large, _ = enlarged(images, torch.zeros(2), {"inputs": (5, 3, 4, 6)})
    assert large.shape == (5, 3, 4, 6)
    assert large.is_contiguous(memory_format=torch.channels_last)
