"""LangChain's ChatOpenAI and `llm` against a server: whole, streamed, with a tool, with a schema.

python check.py URL LLM_COMMAND
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Found(BaseModel):
    a: bool


def langchain(url: str) -> None:
    model = ChatOpenAI(base_url=url, api_key="none", model="default_model", max_tokens=24)
    whole = model.invoke("Count to three.")
    pieces = [chunk.content for chunk in model.stream("Count to three.")]
    assert "".join(pieces) == whole.content, (pieces, whole.content)
    assert len(pieces) > 5
    assert whole.usage_metadata["output_tokens"] > 0

    def add(x: int, y: int) -> int:
        """Adds two numbers."""
        return x + y

    assert model.bind_tools([add]).invoke("What is 1 and 2?").content
    bound = ChatOpenAI(base_url=url, api_key="none", model="default_model", max_tokens=60)
    found = bound.with_structured_output(Found, method="json_schema").invoke(
        "True or false, as JSON."
    )
    assert isinstance(found, Found)
    print("langchain-openai: whole, streamed, tools, schema")


def llm(url: str, command: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = "- model_id: ours\n  model_name: default_model\n"
        models += f"  api_base: {url}\n  api_key_name: none\n"
        Path(folder, "extra-openai-models.yaml").write_text(models)
        environment = {**os.environ, "LLM_USER_PATH": folder}
        line = [command, "-m", "ours", "-o", "max_tokens", "24", "--key", "none", "Count to three."]
        texts = [
            subprocess.run(
                [*line, *more], env=environment, check=True, capture_output=True, text=True
            ).stdout
            for more in ([], ["--no-stream"])
        ]
        assert texts[0] == texts[1], texts
        assert texts[0].strip()
    print("llm: whole, streamed")


if __name__ == "__main__":
    langchain(sys.argv[1])
    llm(*sys.argv[1:3])
