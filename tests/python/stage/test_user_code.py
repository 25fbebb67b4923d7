"""Tests user_code.py: the error that a run raises for an error in user code, and the timing of user code."""

from __future__ import annotations

import pytest
from pipedream import _core
from pipedream.common.errors import DataMismatch, PipelineError
from pipedream.stage.user_code import UserCode


def _user() -> UserCode:
    return UserCode(lambda what: f"stage 1 failed at minibatch 7 in {what}")


def test_results_and_arguments_pass_through() -> None:
    assert _user().run("forward", divmod, 7, 4) == (1, 3)


def test_an_error_of_the_users_is_told_with_its_place() -> None:
    with pytest.raises(PipelineError, match=r"^stage 1 failed at minibatch 7 in forward: .*zero") as caught:
        _user().run("forward", divmod, 7, 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "error", [DataMismatch("other data"), _core.RunFailure("PeerLost", "gone"), KeyboardInterrupt()]
)
def test_what_is_no_error_of_the_users_stays_as_it_is(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        _user().run("forward", fail)
    assert caught.value is error


def test_time_adds_up_also_over_what_fails() -> None:
    user = _user()
    times = [user.elapsed_ns]
    for function in (int, int):
        user.run("forward", function)
        times.append(user.elapsed_ns)
    with pytest.raises(PipelineError):
        user.run("backward", divmod, 1, 0)
    times.append(user.elapsed_ns)
    assert times[0] == 0
    assert times == sorted(set(times))
    assert user.take_elapsed_ns() == times[-1]
    assert user.elapsed_ns == 0
    user.run("forward", int)
    user.drop_elapsed()
    assert user.take_elapsed_ns() == 0
