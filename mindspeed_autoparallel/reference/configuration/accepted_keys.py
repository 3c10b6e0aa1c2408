"""Keys of MindSpeed-MM's files that are known and change nothing in the reference training."""

STACK = (
    "model_id", "image_size", "drop_path_rate", "init_method_std", "initializer_factor", "output_hidden_states",
    "use_return_dict", "params_dtype", "post_layer_norm", "downsample_ratio", "fp16", "bf16", "select_layer",
    "ps_version", "attention_softmax_in_fp32", "use_fused_rotary_pos_emb", "use_repeat_kv", "fusion", "hidden_dropout",
    "attention_dropout", "is_enable_lora", "group_query_attention", "parallel_output", "use_flash_attn",
    "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "persist_layer_norm",
    "variable_seq_lengths", "use_fused_rmsnorm", "use_fused_swiglu", "recompute_skip_core_attention",
    "recompute_in_advance", "hetero_encoder_mbs_scale", "mbs", "tp", "pp", "cp", "hetero", "use_fusion_attn_v2",
    "attention_mask_type", "moe_intermediate_size", "ckpt_path", "position_embedding_type", "rotary_percent",
    "max_window_layers", "sliding_window", "use_sliding_window", "use_cache", "no_load_language_model_ckpt_path",
    "init_method", "attn_dropout", "add_interpolate_tokens", "scale_depth", "use_remove_padding", "tie_word_embeddings",
)  # fmt: skip

MODEL = (
    "model_id", "pre_process", "post_process", "add_text_encoder", "img_embedding_idx", "text_encoder", "video_encoder",
    "hetero_parallel", "load_text_encoder", "loss_cfg", "dist_config", "generation_config", "image_encoder_patch",
)  # fmt: skip

DATA_PREPROCESS = (
    "use_fast_tokenizer", "split_special_tokens", "video_max_pixels", "video_min_pixels", "video_fps", "video_maxlen",
    "resize_vocab", "new_special_tokens", "image_resolution", "video_resolution", "crop_to_patches",
)  # fmt: skip

DATA_BASIC = (
    "template", "cache_dir", "preprocessing_batch_size", "preprocessing_num_workers", "tool_format", "mask_history",
    "overwrite_cache", "preprocessing_on_fly", "cutoff_len", "packing",
)  # fmt: skip

DATA_ATTRIBUTES = ("videos", "observation_tag", "function_tag", "system", "tools", "ranking", "chosen", "rejected")

DATALOADER = (
    "dataloader_mode", "drop_last", "sampler_type", "collate_param", "pin_memory", "num_workers", "prefetch_factor",
    "persistent_workers", "data_sharding", "group_data", "priority_mode",
)  # fmt: skip
