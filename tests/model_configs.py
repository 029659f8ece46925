"""What config.json says, of two models and of small ones that are like some others."""

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
SMALL = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 224,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}
EXPERTS = {"num_experts": 6, "moe_intermediate_size": 40, "num_experts_per_tok": 2}
MLA = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 2,
}
GLM_MOE = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 2,
}
LLAMA4 = {"model_type": "llama4_text", "num_local_experts": 4, "intermediate_size_mlp": 300}
