"""instructor: answers of a type, by a call that is forced; the second behind the first."""

import instructor
from openai import OpenAI
from pydantic import BaseModel
from task import CALLS, MODEL, PIECES, URL, report


class Stock(BaseModel):
    """What is in stock of an article."""

    article: str
    pieces: int


client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0))
messages = [{"role": "user", "content": f"We have {PIECES} blue teapots. Write that down."}]
first = client.chat.completions.create(model=MODEL, response_model=Stock, messages=messages)
messages += [
    {"role": "assistant", "content": first.model_dump_json()},
    {"role": "user", "content": "One was sold. Write down the same article with one piece less."},
]
second = client.chat.completions.create(model=MODEL, response_model=Stock, messages=messages)
CALLS.append(first.article)
report(first.model_dump_json(), second.model_dump_json())
