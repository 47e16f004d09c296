import pytest

from branchline.base.errors import InvalidRequest, ModelError
from branchline.text.template import ChatTemplate, NoTemplate, chat_template
from branchline.wire.messages import ChatPrompt
from tests.support.texts import CHATML, NOON

USER = {"role": "user", "content": "hi"}


def render(text, *messages, max_output_chars=1 << 20, **fields):
    template = ChatTemplate(text, variables={"bos_token": "<s>"}, now=lambda: NOON, max_output_chars=max_output_chars)
    return template.render(ChatPrompt(messages=messages or (USER,), **fields))


def refused(text, *messages, **fields):
    with pytest.raises(InvalidRequest) as caught:
        render(text, *messages, **fields)
    return caught.value


def test_chatml():
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_blocks_are_trimmed_and_loops_may_be_left():
    text = "{% for m in messages %}\n  {% if loop.index > 1 %}\n{% break %}\n  {% endif %}\n{{ m.content }}\n{% endfor %}"
    assert render(text, USER, USER) == "hi\n"


def test_what_templates_expect_to_find():
    assert render("{{ bos_token }}{{ strftime_now('%d %b %Y') }}") == "<s>03 Feb 2025"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hi"}]'
    assert render("{{ {'é': '<'} | tojson(indent=1) }}") == '{\n "é": "<"\n}'
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"
    assert render("{{ mood }}", template_arguments={"mood": "glad"}) == "glad"
    assert render("{% set x = namespace(n=1) %}{% set x.n = 2 %}{{ x.n }}{{ tools is defined }}") == "2False"


def test_the_template_speaks_to_the_client_in_its_own_words_only():
    assert refused("{{ raise_exception('roles must alternate') }}").message == "roles must alternate"
    for text in ("{{ messages[3].content.x }}", "{{ 1 / 0 }}", "{{ messages[0].content + 1 }}", "{{ nobody.home }}"):
        error = refused(text)
        assert error.message == "The chat template of this model cannot render these messages."
        assert error.param == "messages"
    assert len(refused("{{ raise_exception('x' * 9999) }}").message) == 500


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ (raise_exception.__globals__)['json'] }}",
        "{{ strftime_now.__closure__ }}{{ x.y }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ [1] * 99999999 }}",
        "{% for x in range(1000000) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(text):
    assert refused(text).param == "messages"


def test_arithmetic_is_left_alone():
    assert render("{{ 100000 * 100000 }} {{ 'ab' * 2 }} {{ 2 ** 8 }} {{ 1.5 * 2 }}") == "10000000000 abab 256 3.0"


def test_output_is_bounded():
    text = "{% for x in range(1000) %}{{ messages[0].content }}{% endfor %}"
    assert "too long" in refused(text, max_output_chars=1999).message
    assert len(render(text, max_output_chars=2000)) == 2000


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "add_generation_prompt", "raise_exception", "range"])
def test_arguments_may_not_replace_what_is_ours(name):
    error = refused(CHATML, template_arguments={name: "x"})
    assert name in error.message
    assert error.param == "chat_template_kwargs"


def test_the_final_message_is_continued():
    messages = (USER, {"role": "assistant", "content": "Once upon "})
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nOnce upon "
    assert render(CHATML, *messages, **options) == expected
    trimming = CHATML.replace("message['content']", "message['content'] | trim")
    assert render(trimming, *messages, **options) == expected.rstrip()
    assert "leaves out" in refused("{{ messages[0].content }}", *messages, **options).message
    assert refused(CHATML, *messages, continue_final_message=True).param == "continue_final_message"


def test_no_messages_and_no_template():
    with pytest.raises(InvalidRequest, match="empty"):
        ChatTemplate(CHATML, variables={}, now=lambda: NOON).render(ChatPrompt(messages=()))
    nothing = chat_template(None, variables={}, now=lambda: NOON)
    assert isinstance(nothing, NoTemplate)
    with pytest.raises(InvalidRequest, match="--chat-template"):
        nothing.render(ChatPrompt(messages=(USER,)))


def test_a_template_that_is_not_jinja_is_the_operators_to_mend():
    with pytest.raises(ModelError, match="not valid Jinja"):
        chat_template("{% if %}", variables={}, now=lambda: NOON)
