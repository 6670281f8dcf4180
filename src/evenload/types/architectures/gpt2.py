"""GPT-2: learned positions, norms and matrices with biases, queries, keys and values from one matrix.

transformers keeps its matrices as `Conv1D`, [in, out] where `nn.Linear` has [out, in].
"""

from evenload.types.architectures.architecture import Architecture, ModuleNames

FAMILY = (
    Architecture(
        model_type="gpt2",
        classes="GPT2",
        whole_class="GPT2LMHeadModel",
        more_modules=("GPT2Block", "LayerNorm", "Conv1D", "Dropout"),
        names=ModuleNames(
            decoder="transformer",
            embedding="wte",
            positions="wpe",
            layers="h",
            norm="ln_f",
            attention="attn",
            fused="c_attn",
            last_linear="mlp.c_proj",
        ),
        tied=True,
        gated=False,
        biases=True,
        ffn_factor=4,
        keys={
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
        },
        defaults={"max_position_embeddings": 1024},
        dropouts=("attn_pdrop", "resid_pdrop", "embd_pdrop"),
        uncut="makes queries, keys and values with one matrix, whose columns of a head are not together",
        unadapted="keeps its matrices as transformers' Conv1D, and adapters are put on nn.Linear only",
    ),
)
