"""The table of what `examples/serve.py --bench` measured: a server's load, by each attention."""

from __future__ import annotations

from benchmarks.figures import Document
from benchmarks.markdown import header, line


def serve_table(document: Document) -> str:
    """Tokens a second of each contender, and the times of a request."""
    load, size, made = document["load"], document["size"], document["environment"]
    told = (
        f"{load['requests']} requests to a GPT of {size['depth']} layers, {size['heads']} heads "
        f"over {size['kv_heads']} of {size['head_dim']}, {document['dtype']}; at most "
        f"{load['batch']} run at once; {made['gpu']}, torch {made['torch']}, triton "
        f"{made['triton']}, {made['date']}, one run."
    )
    columns = ["attention", "tokens/s", "first token, ms", "between tokens, ms", "steps", "shared"]
    lines = header(columns)
    for cell in document["cells"]:
        lines.append(
            line(
                [
                    cell["name"],
                    f"{cell['tokens_a_second']:,.0f}",
                    f"{cell['first_ms']:,.0f}",
                    f"{cell['between_ms']:.1f}",
                    f"{sum(cell['steps'].values()):,}",
                    f"{cell['shared']:,}",
                ]
            )
        )
    return told + "\n\n" + "\n".join(lines)
