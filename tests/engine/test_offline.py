"""The `LLM` class on the default model: the same loop in one process."""

import pytest

import branchline
from branchline import LLM, SamplingParams
from branchline.base.errors import ConfigError, InvalidRequest, ModelError

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(default_checkpoint):
    with LLM(pages=256, max_running=8) as llm:
        yield llm


def test_one_prompt_one_completion(llm):
    completion = llm.generate("The capital of France is", GREEDY)
    assert "Paris" in completion.text
    assert (completion.finish_reason, completion.prompt_tokens, completion.completion_tokens) == ("length", 5, 8)


def test_a_batch_keeps_its_order_and_reports_progress(llm):
    progress = []
    prompts = ["The capital of France is", "Two and two is", "The sky is"]
    completions = llm.generate(prompts, GREEDY, progress=lambda done, total: progress.append((done, total)))
    assert [completion.text for completion in completions] == [llm.generate(prompt, GREEDY).text for prompt in prompts]
    assert progress == [(1, 3), (2, 3), (3, 3)]


def test_token_ids_are_prompts_too(llm):
    text = llm.generate("The sky is", GREEDY)
    tokens = llm.tokenize("The sky is")
    assert llm.generate(tokens, GREEDY).text == text.text
    assert [c.text for c in llm.generate([tokens, tokens], GREEDY)] == [text.text] * 2


def test_each_prompt_may_have_its_own_parameters(llm):
    short, long = llm.generate(["One", "One"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5, ignore_eos=True)])
    assert (short.completion_tokens, long.completion_tokens) == (2, 5)
    with pytest.raises(InvalidRequest):
        llm.generate(["One", "One"], [GREEDY])


def test_a_stream_says_what_generate_says(llm):
    assert "".join(llm.stream("The sky is", GREEDY)) == llm.generate("The sky is", GREEDY).text


def test_leaving_a_stream_early_gives_everything_back(llm):
    for _ in llm.stream("Once upon a time", SamplingParams(max_tokens=200, ignore_eos=True)):
        break
    assert llm.generate("The sky is", GREEDY).completion_tokens == 8
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.pages_private, stats.locked_nodes) == (0, 0, 0, 0)


def test_a_chat(llm):
    answer = llm.chat([{"role": "user", "content": "What is the capital of France? One word."}], GREEDY)
    assert "Paris" in answer.text


def test_logprobs_come_along(llm):
    completion = llm.generate("The sky is", SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=0))
    assert len(completion.logprobs) == 3
    assert all(len(row.top) == 2 for row in completion.logprobs)
    assert [row.logprob is None for row in completion.prompt_logprobs] == [True, False, False]


@pytest.mark.parametrize("prompt", ["", [10**9], [-1]])
def test_a_bad_prompt_is_refused_and_the_engine_lives(llm, prompt):
    if prompt:
        with pytest.raises(InvalidRequest):
            llm.generate(prompt, GREEDY)
    assert llm.generate("The sky is", GREEDY).completion_tokens == 8


def test_one_bad_prompt_of_a_batch_refuses_the_batch(llm):
    with pytest.raises(InvalidRequest):
        llm.generate([[1, 2, 3], [10**9]], GREEDY)
    assert llm.generate("The sky is", GREEDY).completion_tokens == 8
    assert llm.stats().running == 0


def test_bad_settings_and_models_are_said_before_anything_is_loaded():
    with pytest.raises(ConfigError):
        LLM(max_running=0)
    with pytest.raises(ModelError):
        LLM("/nowhere/model.gguf")
    with pytest.raises(TypeError):
        LLM(no_such_setting=1)


def test_the_package_offers_little_at_its_top():
    assert branchline.__all__ == ["LLM", "SamplingParams", "__version__"]
    with pytest.raises(AttributeError):
        branchline.nonsense  # noqa: B018
