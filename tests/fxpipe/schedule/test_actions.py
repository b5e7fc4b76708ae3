import pytest

from fxpipe.schedule import Action, Kind, Overlap
from fxpipe.schedule.actions import NotAnAction, parse_entry

F, B = Kind.FORWARD, Kind.BACKWARD


@pytest.mark.parametrize(
    "text, entry",
    [
        ("0F1", Action(0, F, 1)),
        ("12B34", Action(12, B, 34)),
        ("1I2", Action(1, Kind.BACKWARD_INPUT, 2)),
        ("1W2", Action(1, Kind.WEIGHT_GRAD, 2)),
        ("(0F4;7B1)OVERLAP_F_B", Overlap((Action(0, F, 4), Action(7, B, 1)))),
    ],
)
def test_what_is_written_is_read_again(text, entry):
    assert str(entry) == text
    assert parse_entry(f" {text} ") == entry


def test_an_action_and_an_overlap_have_parts():
    forward, backward = Action(0, F, 4), Action(7, B, 1)
    assert forward.parts == (forward,)
    assert Overlap((forward, backward)).parts == (forward, backward)


@pytest.mark.parametrize(
    "text, kind",
    [
        ("1SEND_F2", "SEND_F"),
        ("1WAIT_SEND_F2", "WAIT_SEND_F"),
        ("1RECV_B0", "RECV_B"),
        ("0UNSHARD", "UNSHARD"),
        ("0RESHARD", "RESHARD"),
        ("3REDUCE_GRAD", "REDUCE_GRAD"),
    ],
)
def test_what_computes_nothing_is_known_by_its_kind(text, kind):
    assert parse_entry(text) == kind


@pytest.mark.parametrize(
    "text", ["F1", "0X1", "0F", "0F1 1F1", "(0F1;)OVERLAP_F_B", "(0F1;1B0)", "-1F0"]
)
def test_other_text_is_refused(text):
    with pytest.raises(NotAnAction, match=r"is not an action: write stage, kind .* such as 2F0"):
        parse_entry(text)
