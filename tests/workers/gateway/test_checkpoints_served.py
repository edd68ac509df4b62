"""Checkpoints as clients meet them: the model's name, its chat template, and whose fault a failure is."""

import json
from pathlib import Path

from tests.workers.models.checkpoints import random_model, save
from tests.workers.serving import SlowWan, run
from workers.models import ModelSpec, load_model

TEMPLATE = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{{ m.content }}{% if m.role == 'assistant' %}{% generation %}!{% endgeneration %}{% endif %}{% endfor %}
{% if style or messages | length > 4 %}{{ style.of.nothing }}{% endif %}"""


def test_a_checkpoint_is_served_by_its_name_with_its_template(tmp_path: Path) -> None:
    path = save(random_model("llama"), tmp_path / "Llama-3.2-1B")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    loaded = load_model(ModelSpec(f"{path}/"))

    async def scenario() -> None:
        async with SlowWan(loaded, tmp_path, None) as wan:
            listed = (await wan.http.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == ["Llama-3.2-1B"]
            assert (await wan.http.get("/v1/models/Llama-3.2-1B")).status_code == 200
            ask = {"role": "user", "content": "a"}
            body = {
                "model": "Llama-3.2-1B",
                "max_tokens": 2,
                "messages": [ask, {"role": "assistant", "content": "b"}, ask],
            }
            answer = await wan.http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == "Llama-3.2-1B"
            assert answer.json()["usage"]["prompt_tokens"] == len("ab!a")
            refused = await wan.http.post(
                "/v1/chat/completions", json=body | {"messages": [{"role": "system", "content": "x"}, ask]}
            )
            assert (refused.status_code, "no system role" in refused.text) == (400, True)
            for more, status in (({"messages": [ask] * 5}, 500), ({"chat_template_kwargs": {"style": 1}}, 400)):
                broken = await wan.http.post("/v1/chat/completions", json=body | more)
                assert (broken.status_code, "chat template fails at its line 3" in broken.text) == (status, True)

    run(scenario())
