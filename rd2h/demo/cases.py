"""The prompts of the demo: each is a way in which pulling KV cache could go wrong."""

from dataclasses import dataclass

from rd2h.demo.engine_spec import SERVED_NAME

# The tokenizer is byte-level: one ASCII character is one token.
_FABLE = (
    "A fox saw a bunch of grapes hanging high on a vine and wanted them for supper. It ran, it jumped, it ran again, "
    "and every jump ended a hand's breadth too low. In the end it turned away with its nose in the air and told the "
    "hedge that the grapes were sour anyway, which the hedge, having heard it from other foxes, did not believe. "
)
_PREAMBLE = (
    "You are the night clerk of a small hotel by the sea. Answer every guest in one short and friendly sentence, never "
    "promise what the kitchen cannot do after ten, and if a guest asks for the lighthouse, say that it is closed but "
    "that the stairs are not locked, the light is on, and the keeper likes company as long as it brings tea. Guest: "
)


@dataclass(frozen=True)
class Case:
    """Prompts sent in one request, and how many choices of each."""

    name: str
    prompts: tuple[str, ...]
    choices: int = 1
    max_tokens: int = 24

    @property
    def children(self) -> int:
        """Engine requests that this request becomes."""
        return len(self.prompts) * self.choices

    def prompt_blocks(self, block_tokens: int) -> int:
        """KV blocks of all children's prompts, cached or not."""
        return self.choices * sum(-(-len(prompt) // block_tokens) for prompt in self.prompts)

    def body(self) -> dict[str, object]:
        """The OpenAI completion request. Several choices need sampling; a seed makes it repeatable."""
        sampling: dict[str, object] = {"temperature": 0}
        if self.choices > 1:
            sampling = {"temperature": 0.8, "seed": 7, "n": self.choices}
        return {
            "model": SERVED_NAME,
            "prompt": self.prompts[0] if len(self.prompts) == 1 else list(self.prompts),
            "max_tokens": self.max_tokens,
            "return_token_ids": True,
            **sampling,
        }


def equality_cases(chunk_tokens: int) -> tuple[Case, ...]:
    """The cases that are compared token by token; `chunk_tokens` is the engines' prefill chunk."""
    several_chunks = (_FABLE * 9)[: 3 * chunk_tokens + 5]
    return (
        Case("one token", ("a",)),
        Case("exactly one block", ("sixteen tokens!!",)),
        Case("one block and one token", ("seventeen tokens.",)),
        Case(f"{len(several_chunks)} tokens in chunks of {chunk_tokens}", (several_chunks,)),
        Case("shared prefix, first time", (_PREAMBLE + "is there soup?",)),
        Case("shared prefix, second time", (_PREAMBLE + "where can I see the stars from?",)),
        Case("the same prompt again", (_PREAMBLE + "is there soup?",)),
        Case(
            "5 prompts, 2 choices each",
            (
                "The tide table says",
                "One, two, three and then",
                "My grandmother always told me: " + _FABLE[:70],
                "x",
                "Dear sir or madam, with regard to your letter of the fourth of May",
            ),
            choices=2,
        ),
    )


def control_cases(chunk_tokens: int) -> tuple[Case, ...]:
    """Cases for the engine whose reads are suppressed: prompts that no engine has seen, longer than one token.

    A prompt of one token cannot differ: Decode always computes the last token itself.
    """
    return (
        Case("control: one block and one token", ("eighteen herrings",)),
        Case("control: several chunks", (_FABLE[5:] + _PREAMBLE[: chunk_tokens + 20],)),
    )
