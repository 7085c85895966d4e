"""Templates that compute without end or fill the memory end their own process, and nothing else."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from calls import until

from paceline.client import InvalidRequestError, Model, TemplateProcess, render_chat
from paceline.v1 import verifier_pb2

MESSAGES = [{"role": "user", "content": "é 😀"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def model_of(template: str) -> Model:
    return Model(verifier_pb2.GetModelResponse(name="m", chat_template=template), None)


def rendered(process: TemplateProcess, template: str, **options: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(
        asyncio.to_thread(process.render, model_of(template), MESSAGES, **options)
    )


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(seconds=0.5, memory=256 << 20)
    yield made
    made.close()


async def test_a_prompt_is_that_of_this_process(process: TemplateProcess) -> None:
    for _ in range(3):
        assert await rendered(process, PLAIN) == "<user>é 😀"
    options = {"continue_final_message": True, "variables": {"x": 1}}
    assert await rendered(process, PLAIN, **options) == "<user>é 😀"
    for template in ("{{ raise_exception('No: ä') }}", "{% if %}"):
        with pytest.raises(InvalidRequestError) as here:
            render_chat(model_of(template), MESSAGES)
        with pytest.raises(InvalidRequestError) as there:
            await rendered(process, template)
        assert str(here.value) == str(there.value)


@pytest.mark.parametrize(
    "template",
    [
        ENDLESS,
        "{% set x = range(99999) | list %}{% for i in x %}{% for j in x %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 10 ** (10 ** messages[0].content | length * 3) }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ 'x'.center(10 ** 9) }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{% set ns = namespace(t='x') %}{% for i in range(99) %}{% set ns.t = ns.t ~ ns.t %}"
        "{% endfor %}",
        "{% set ns = namespace(t=[1]) %}{% for i in range(99) %}{% set ns.t = ns.t + ns.t %}"
        "{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ {'a': 1} | tojson(indent=10 ** 9) }}",
    ],
)
async def test_a_hostile_template_is_refused(process: TemplateProcess, template: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        await rendered(process, template)
    assert await rendered(process, PLAIN) == "<user>é 😀"


async def test_the_event_loop_is_free_meanwhile(process: TemplateProcess) -> None:
    rendering = rendered(process, ENDLESS)
    turns = 0
    while not rendering.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 5
    with pytest.raises(InvalidRequestError):
        await rendering


async def test_closing_ends_what_is_rendered() -> None:
    process = TemplateProcess(seconds=600)
    rendering = rendered(process, ENDLESS)
    await until(lambda: "not started" not in repr(process))
    await asyncio.to_thread(process.close)
    with pytest.raises(InvalidRequestError):
        await rendering
