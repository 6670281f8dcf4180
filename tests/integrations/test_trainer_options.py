"""Options of a Trainer and of its model that draw random numbers, or whose effect depends on what is in a row.

Every option of the installed `TrainingArguments` and `SFTConfig` is in one of the lists below: a new one of a later
version fails here until somebody has looked at it.
"""

import dataclasses

import pytest
import torch
import trl
from test_loader_inputs import tokenizer  # noqa: F401
from test_trainer import WEIGHTS, reference_run, sft  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from evenload.check.smaller_run import Float64Casts
from evenload.errors import ConfigError, UnsupportedModelError
from evenload.integrations.trainer import _OTHERWISE
from packed_cases import documents_of, loader_of, reference_gradient, tiny_model, tokens_of, write_texts
from reference_training import tiny_config
from trainer_cases import PackedTrainer, arguments, run, weights_of
from trl_cases import kernel_in_float64

# TRL's own use of names that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

CHECKED = {
    # In `_refuse_settings` and `_refuse_trainer`.
    *("max_steps", "gradient_accumulation_steps", "average_tokens_across_devices", "parallelism_config"),
    # In `_refuse_model`, once TRL has written it into the model's configuration.
    "router_aux_loss_coef",
    # Trained below as one document after the other would be.
    *("torch_compile", "torch_compile_backend", "torch_compile_mode", "loss_type"),
    # Said by the mixin: the loader goes on by its own state, and nothing is left for TRL to prepare.
    *("ignore_data_skip", "dataset_kwargs"),
}
"""Options that are looked at, beside those of `_OTHERWISE`."""

HARMLESS = {
    "how weights change, from gradients that no longer know of rows": """
        learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1
        adam_beta2 adam_epsilon optim_target_modules max_grad_norm""",
    "precision, memory and speed of the same sums; of single tokens": """
        bf16 fp16 bf16_full_eval fp16_full_eval tf32 activation_checkpointing activation_checkpointing_kwargs
        gradient_checkpointing gradient_checkpointing_kwargs use_cache torch_empty_cache_steps activation_offloading
        full_determinism use_cpu use_liger_kernel liger_kernel_config""",
    "ranks and processes": """
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp
        fsdp_config deepspeed accelerator_config local_rank""",
    "the Trainer's own data loader, whose place the loader takes": """
        per_device_train_batch_size per_device_eval_batch_size num_train_epochs dataloader_drop_last
        dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
        dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names length_column_name
        dataset_num_proc pad_token data_seed seed""",
    "what is logged, when, and whereto": """
        logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
        include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project
        trackio_space_id trackio_bucket_id trackio_static_space_id debug skip_memory_metrics""",
    "when to evaluate; predictions, which evaluation by a loader does not give": """
        eval_strategy eval_steps eval_delay prediction_loss_only eval_on_start eval_do_concat_batches
        eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics do_train do_eval
        do_predict""",
    "files": """
        output_dir save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint
        push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
        load_best_model_at_end metric_for_best_model greater_is_better restore_callback_states_from_checkpoint
        resume_from_checkpoint""",
    "how TRL loads a model that is given by name; `_refuse_model` looks at the model": """
        model_init_kwargs trust_remote_code""",
}
"""Options without an effect on what a row's tokens give, and why."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """As in test_trainer."""
    root = tmp_path_factory.mktemp("corpus")
    write_texts(root, num_documents=24, longest=30)
    return root


def small(kind: str, **changes):
    """A small model of any kind that transformers has, in float64, of large random weights."""
    sizes = {
        "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
        "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(sizes | changes))
    config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config).double()


def trainer_of(corpus, output, model, **changes):
    loader = {key: changes.pop(key) for key in ("max_tokens", "max_document_tokens") if key in changes}
    return PackedTrainer(model, arguments(output, **changes), train_loader=loader_of(corpus, micro_batches=4, **loader))


def evaluated(corpus, output, model, loader=None, **settings):
    """A trainer with data for evaluation."""
    evaluation = loader_of(corpus, evaluation=True, shuffle_window=1, **(loader or {}))
    loaders = {"train_loader": loader_of(corpus, micro_batches=4), "eval_loader": evaluation}
    return PackedTrainer(model, arguments(output), **loaders, **settings)


def plain_evaluation(corpus, model):
    """The loss of all documents, one by one."""
    texts = (corpus / "texts.jsonl").read_text().splitlines()
    return reference_gradient(model, [tokens_of(text[10:-2]) for text in texts])[0]


def test_every_option_of_the_installed_versions_was_looked_at():
    harmless = [name for names in HARMLESS.values() for name in names.split()]
    known = [*CHECKED, *_OTHERWISE, *harmless]
    assert len(known) == len(set(known)), "an option is in one list only"
    result = {field.name for options in (TrainingArguments, trl.SFTConfig) for field in dataclasses.fields(options)}
    assert result - set(known) == set(), "decide what these do to packs"
    assert set(known) - result == set(), "these are gone"


SWITCHES = ("packing", "eval_packing", "padding_free", "shuffle_dataset", "assistant_only_loss", "auto_find_batch_size")
REFUSED = [
    *((name, True) for name in SWITCHES),
    *(("completion_only_loss", True), ("completion_only_loss", False)),
    *(("packing_strategy", "wrapped"), ("pad_to_multiple_of", 8), ("max_length", 32), ("truncation_mode", "keep_end")),
    *(("dataset_text_field", "content"), ("chat_template_path", "somewhere"), ("eos_token", "</s>")),
    *(("neftune_noise_alpha", 5.0), ("label_smoothing_factor", 0.1), ("train_sampling_strategy", "batch_rebalance")),
]


@pytest.mark.parametrize(("option", "value"), REFUSED)
def test_options_of_trl_that_would_do_nothing_are_refused(corpus, sft, option, value):  # noqa: F811
    with pytest.raises(ConfigError, match=f"^{option} is {value}: .*; leave it out"):
        sft(tiny_model(), loader_of(corpus, micro_batches=4), **{option: value})


def test_every_refused_option_has_a_case_and_a_limit_that_no_document_passes_is_none(corpus, sft):  # noqa: F811
    assert {option for option, _ in REFUSED} == set(_OTHERWISE)
    for limit in (64, None):
        sft(tiny_model(), loader_of(corpus, micro_batches=4), max_length=limit)


def test_a_compiled_model_trains_as_documents_one_by_one(corpus, tmp_path):
    _, weights = reference_run(corpus, 2)
    _, result, _ = run(corpus, tmp_path, max_steps=2, torch_compile=True, torch_compile_backend="eager")
    torch.testing.assert_close(result, weights, rtol=WEIGHTS, atol=WEIGHTS)


def test_trl_dft_trains_and_evaluates_documents_one_by_one(corpus, tmp_path, sft):  # noqa: F811
    """The loss of a token times its own probability: nothing of its row."""
    model, weights = tiny_model(), tiny_model()
    loader = loader_of(corpus, micro_batches=4)
    trainer = sft(model, loader, loss_type="dft", max_steps=1)
    step = next(iter(loader_of(corpus, micro_batches=4).steps()))
    documents = [torch.tensor([one]) for batch in step for one in documents_of(batch)]

    def loss():
        total = 0.0
        for ids in documents:
            if ids.shape[1] > 1:
                log_probs = weights(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
                chosen = log_probs.gather(1, ids[0, 1:, None])
                total = total - (chosen * chosen.exp().detach()).sum()
        return total / sum(ids.shape[1] - 1 for ids in documents)

    loss().backward()
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter -= 0.5 * parameter.grad
    with kernel_in_float64(), Float64Casts():  # TRL's function of the loss is called by no module
        trainer.train()
    torch.testing.assert_close(weights_of(model), weights_of(weights), rtol=WEIGHTS, atol=WEIGHTS)


def test_evaluation_is_by_the_loss_that_is_trained(corpus, tmp_path):
    """A loss function of the user's counts in evaluation as well."""

    def doubled(outputs, labels, num_items_in_batch):
        logits, targets = outputs.logits[0, :-1], labels[0, 1:]
        return 2 * torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    trainer = evaluated(corpus, tmp_path, tiny_model(), compute_loss_func=doubled, loader={"batch_tokens": 50})
    assert trainer.evaluate()["eval_loss"] == pytest.approx(2 * plain_evaluation(corpus, trainer.model), rel=1e-6)
    with pytest.raises(ConfigError, match="eval_loader=PackedLoader"):
        trainer.evaluate(eval_dataset=[{"input_ids": [1, 2]}])


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("llama", {"attention_dropout": 0.1}, r"attention_dropout of model\.layers\.0\.self_attn"),
        ("gpt2", {"attn_pdrop": 0.1}, r"p of transformer\.h\.0\.attn\.attn_dropout \(Dropout\) is 0\.1"),
        ("gpt2", {"resid_pdrop": 0.1}, "resid_dropout"),
        ("gpt2", {"embd_pdrop": 0.1}, r"p of transformer\.drop "),
        ("opt", {"layerdrop": 0.2}, r"layerdrop of model\.decoder"),
        ("mixtral", {"router_jitter_noise": 0.1, "num_local_experts": 2}, "jitter_noise of"),
        ("gpt_neox", {"hidden_dropout": 0.1}, r"p of gpt_neox\.emb_dropout"),
    ],
)
def test_random_numbers_in_the_model_are_refused_by_name(corpus, tmp_path, kind, changes, named):
    none = {"gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"), "opt": ("dropout",), "gpt_neox": ("hidden_dropout",)}
    rest = {"word_embed_proj_dim": 32, "ffn_dim": 48} if kind == "opt" else {}
    model = small(kind, **(dict.fromkeys(none.get(kind, ()), 0.0) | rest | changes))
    with pytest.raises(UnsupportedModelError, match=named):
        trainer_of(corpus, tmp_path, model)


def test_random_numbers_in_an_adapter_are_refused(corpus, tmp_path, sft):  # noqa: F811
    import peft

    settings = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(lora_dropout=0.05, **settings))
    with pytest.raises(UnsupportedModelError, match=r"p of .*lora_dropout.* is 0\.05"):
        trainer_of(corpus, tmp_path, model)
    with pytest.raises(UnsupportedModelError, match="lora_dropout"):
        sft(model, loader_of(corpus, micro_batches=4))
    trainer_of(corpus, tmp_path, peft.get_peft_model(tiny_model(), peft.LoraConfig(**settings)), max_steps=1).train()


@pytest.mark.parametrize(
    ("kind", "factors"), [("dynamic", {}), ("longrope", {"short_factor": [1.0] * 6, "long_factor": [3.0] * 6})]
)
def test_rotary_positions_of_the_longest_document_are_refused_where_they_differ(corpus, tmp_path, kind, factors):
    settings = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    model = tiny_model(rope_parameters=settings, max_position_embeddings=32)
    with pytest.raises(UnsupportedModelError, match=f"rope_type '{kind}' .*max_document_tokens = 32"):
        trainer_of(corpus, tmp_path, model)
    trainer_of(corpus, tmp_path, model, max_document_tokens=32, max_steps=1).train()


def test_attention_scaled_by_places_in_the_pack_is_refused(corpus, tmp_path):
    llama4 = {"num_local_experts": 2, "intermediate_size_mlp": 48, "layer_types": ["full_attention"] * 2}
    model = small("llama4_text", attn_temperature_tuning=True, floor_scale=64, no_rope_layers=[0, 1], **llama4)
    with pytest.raises(UnsupportedModelError, match=r"attn_temperature_tuning .*floor_scale = 64 .*it is 64"):
        trainer_of(corpus, tmp_path, model)
    trainer_of(corpus, tmp_path, model, max_tokens=63)


def test_a_load_balancing_loss_of_packs_is_refused(corpus, tmp_path, sft):  # noqa: F811
    def model(**changes):
        return AutoModelForCausalLM.from_config(tiny_config("mixtral", vocab_size=257, **changes)).double()

    with pytest.raises(UnsupportedModelError, match=r"output_router_logits adds 0\.3 times"):
        trainer_of(corpus, tmp_path, model(output_router_logits=True, router_aux_loss_coef=0.3))
    trainer_of(corpus, tmp_path, model(output_router_logits=True, router_aux_loss_coef=0.0))
    # TRL switches it on for every model with a router.
    with pytest.raises(UnsupportedModelError, match="router_aux_loss_coef = 0"):
        sft(model(), loader_of(corpus, micro_batches=4))
    sft(model(), loader_of(corpus, micro_batches=4), router_aux_loss_coef=0.0)


OPT = {"word_embed_proj_dim": 32, "ffn_dim": 48, "dropout": 0.0}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("opt", OPT),
        ("bloom", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
        ("mamba", {}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    ],
)
def test_models_that_mix_the_documents_of_a_pack_are_refused(corpus, tmp_path, kind, changes):
    trainer = trainer_of(corpus, tmp_path, small(kind, **changes))
    before = weights_of(trainer.model).clone()
    with pytest.raises(UnsupportedModelError, match="does not keep the documents of a pack apart"):
        trainer.train()
    assert torch.equal(weights_of(trainer.model), before)


def test_evaluation_tries_the_model_as_well(corpus, tmp_path):
    with pytest.raises(UnsupportedModelError, match="OPTForCausalLM does not keep"):
        evaluated(corpus, tmp_path, small("opt", **OPT)).evaluate()


CHUNKED = {"attention_chunk_size": 4, "layer_types": ["chunked_attention"] * 2, "no_rope_layers": [1, 1]}
LLAMA4 = {"attn_temperature_tuning": False, "num_local_experts": 2, "intermediate_size_mlp": 48} | CHUNKED


@pytest.mark.parametrize(
    ("kind", "changes"), [("llama4_text", LLAMA4), ("mixtral", {"num_local_experts": 4}), ("qwen3", {})]
)
def test_models_that_keep_documents_apart_give_their_losses(corpus, tmp_path, kind, changes):
    """Chunks of attention begin anew in every document too."""
    trainer = evaluated(corpus, tmp_path, small(kind, **changes))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain_evaluation(corpus, trainer.model), rel=2e-6)
