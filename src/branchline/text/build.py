"""Puts a text side together from a checkpoint: the one place that knows its concrete parts."""

from datetime import datetime

from branchline.base.rng import fresh_seed
from branchline.models.checkpoint import Checkpoint
from branchline.text.side import TextSide
from branchline.text.template import chat_template
from branchline.text.tokenizer import Tokenizer
from branchline.wire.messages import ModelFacts


def build_text_side(checkpoint: Checkpoint, facts: ModelFacts, *, template: str | None = None) -> TextSide:
    """A text side for the model of ``checkpoint``. ``template`` is Jinja text that replaces the model's.

    Raises:
        ModelError: the tokenizer or the template cannot be used.
    """
    source = checkpoint.tokenizer
    tokenizer = Tokenizer.from_source(source)
    text = source.chat_template if template is None else template
    chat = chat_template(text, variables=tokenizer.variables, now=lambda: datetime.now().astimezone())
    return TextSide(tokenizer, chat, facts, draw_seed=fresh_seed)
