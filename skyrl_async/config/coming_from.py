"""The keys of SkyRL, verl and AReaL and ours for the same thing: one table for hints, for ``--from-skyrl`` and for docs/coming_from.md.

A line is ``their key | their default | our key | values | note``; indented lines continue it.

- Their key: further spellings follow after commas. ``.*`` at its end is everything below it.
- Our key: ``=`` where it has the same name, empty where there is none.
- Values: ``theirs: ours`` where these differ, after semicolons. Ours may be whole settings (``key=value``), or empty where nothing needs
  setting. ``*`` is any other value of theirs.
- The note says what else differs, or what to do instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

_SKYRL = """
data.train_data | [~/data/gsm8k/train.parquet] | task.train_files || with task=dataset; files or directories on this machine, no names of the Hub
data.val_data | [~/data/gsm8k/validation.parquet] | task.eval_files || the first evaluation.num_prompts (between steps num_prompts_while_training) are used; SkyRL uses all
data.dataloader.* ||| *: | prompts are read once, in the trainer's process
trainer.policy.model.path | Qwen/Qwen2.5-1.5B-Instruct | policy.path || with policy=hf; a local directory, see hf download NAME --local-dir DIR
trainer.policy.model.lora.rank | 0 | policy.lora.rank
trainer.policy.model.lora.alpha | 16 | policy.lora.alpha
trainer.policy.model.lora.dropout | 0.0 | policy.lora.dropout
trainer.policy.model.lora.target_modules | all-linear | policy.lora.target_modules
trainer.policy.model.lora.exclude_modules | null | policy.lora.exclude_modules
trainer.policy.model.lora.init_method | kaiming | policy.lora.init_method | normal: gaussian
trainer.policy.model.lora.lora_sync_path ||| *: | adapters are published through shared memory, see policy.lora.publish
trainer.policy.model.lora.max_loras, trainer.policy.model.lora.max_cpu_loras ||| 1:; null: | an engine serves one adapter
trainer.policy.model.fake_int4_qat.* ||| false: | no quantization-aware training
trainer.policy.optimizer_config.lr | 1.0e-6 | training.lr
trainer.policy.optimizer_config.adam_betas | [0.9, 0.999] | training.adam_beta1 training.adam_beta2
trainer.policy.optimizer_config.weight_decay | 0.01 | training.weight_decay
trainer.policy.optimizer_config.max_grad_norm | 1.0 | training.max_grad_norm
trainer.policy.optimizer_config.num_warmup_steps | 0 | training.num_warmup_steps
trainer.policy.optimizer_config.scheduler | constant_with_warmup | training.lr_schedule | constant_with_warmup: constant
    | warm-up is training.num_warmup_steps; constant, linear or cosine
trainer.policy.optimizer_config.offload_after_step ||| *: | SkyRL uses it where training and engines share GPUs; see training.cpu_offload
trainer.policy.fsdp_config.cpu_offload | false | training.cpu_offload
trainer.policy.fsdp_config.reshard_after_forward ||| true: | weights are always sharded again after the forward
trainer.policy.fsdp_config.fsdp_size ||| -1: | always sharded over all ranks
trainer.policy.fsdp_config.mixed_precision ||| null: | training.mixed_precision=true: bfloat16 over float32 weights
trainer.policy.fsdp_config.wrap_policy.* ||| *: | each layer of the model is a unit
trainer.policy.sequence_parallel_size, trainer.ref.sequence_parallel_size, trainer.critic.sequence_parallel_size ||| 1:
    | no sequence parallelism; training.micro_batch_tokens bounds a forward
trainer.sequence_parallel_backend ||| *: | no sequence parallelism
trainer.policy.use_torch_compile ||| false: | the model is trained without torch.compile
trainer.policy.record_memory ||| false: | no memory snapshots
trainer.policy.torch_profiler_config.* ||| *: | no profiler of kernels; logging.trace writes a trace of the stages
trainer.policy.megatron_config.*, trainer.ref.megatron_config.* |||| no Megatron: training=fsdp or training=deepspeed
trainer.policy.model_config_kwargs.*, trainer.ref.model_config_kwargs.* |||| change config.json in the directory of policy.path
trainer.policy.language_model_only, trainer.ref.language_model_only ||| false: | models are loaded as AutoModelForCausalLM
trainer.policy.inference_only_init ||| false: | trainer.eval_only=true evaluates without training
trainer.critic.* ||| *: | there is no critic: advantages are of groups of samples
trainer.critic_mini_batch_size ||| *: | there is no critic
trainer.ref.model.path | null | trainer.ref.path || a local directory
trainer.ref.model.* ||| *: | the reference has no adapters
trainer.ref.fsdp_config.* ||| *: | the reference is sharded as the policy is
trainer.placement.colocate_all ||| false:; true: placement.groups=[[policy,generate]] placement.ratios=[1.0]
    | engines and policy workers have devices of their own unless placement.groups shares them, see docs/placement.md
trainer.placement.colocate_policy_ref ||| true: | the reference is computed by the policy workers; training.num_ref_workers gives it its own
trainer.placement.policy_num_gpus_per_node, trainer.placement.policy_num_nodes | 1 | training.num_workers || GPUs of all nodes together
trainer.placement.ref_num_gpus_per_node, trainer.placement.ref_num_nodes ||| *:
    | the reference is computed by the policy workers, as with colocate_policy_ref=true; training.num_ref_workers gives it its own
trainer.placement.critic_num_gpus_per_node, trainer.placement.critic_num_nodes ||| *: | there is no critic
trainer.use_expandable_segments, generator.inference_engine.use_expandable_segments ||| *:
    | set PYTORCH_CUDA_ALLOC_CONF in the environment
trainer.strategy | fsdp | training.backend | fsdp2: fsdp | fsdp or deepspeed; no Megatron
trainer.algorithm.advantage_estimator | grpo | = || gae needs a critic, which there is not
trainer.algorithm.kl_ctrl.type | fixed | =
trainer.algorithm.kl_ctrl.kl_target | 0.1 | =
trainer.algorithm.kl_ctrl.horizon | 10000 | =
trainer.algorithm.kl_estimator_type | k3 | = || ours is by default k3 in the loss and k1 in the reward
trainer.algorithm.use_kl_in_reward | false | =
trainer.algorithm.use_kl_loss | true | =
trainer.algorithm.kl_loss_coef | 0.001 | =
trainer.algorithm.use_entropy_loss | false | =
trainer.algorithm.entropy_loss_coef | 0.01 | =
trainer.algorithm.temperature ||| *: | log-probs are of generator.sampling.temperature
trainer.algorithm.advantage_batch_normalize ||| false: | advantage_estimator=reinforce++ or reinforce++_baseline normalises over the mini-batch
trainer.algorithm.policy_loss_type | regular | = | cispo: cispo_old
    | ratios are to the engine's log-probs, in decoupled_ppo and cispo_old to recomputed ones; SkyRL's rollout_is masks ratios
    out of 1 - eps_clip_low and 1 + eps_clip_high, ours caps them at tis_cap
trainer.algorithm.loss_reduction | token_mean | =
trainer.algorithm.grpo_norm_by_std | true | =
trainer.algorithm.zero_variance_filter ||| *: | groups of equal rewards have advantages of 0; trainer.fully_async.sample_full_batch replaces them
trainer.algorithm.zero_variance_filter_tol | 1.0e-6 | =
trainer.algorithm.lambd, trainer.algorithm.gamma, trainer.algorithm.value_clip, trainer.algorithm.value_head_prefix ||| *:
    | there is no critic: advantages are of groups of samples
trainer.algorithm.eps_clip_low | 0.2 | =
trainer.algorithm.eps_clip_high | 0.2 | =
trainer.algorithm.clip_ratio_c | 3.0 | =
trainer.algorithm.use_tis || trainer.algorithm.off_policy_correction.tis_ratio_type | true: token; false: null
    | with policy_loss_type=decoupled_ppo, cispo_old or rollout_is
trainer.algorithm.tis_imp_ratio_cap || trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high | -1.0: ; -1:
trainer.algorithm.off_policy_correction.tis_ratio_type | null | =
trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high | 2.0 | =
trainer.algorithm.off_policy_correction.sequence_tis_ratio_clip_high | 5.0 | =
trainer.algorithm.off_policy_correction.sequence_mask_metric | null | =
trainer.algorithm.off_policy_correction.geo_mask_high | 1.01 | =
trainer.algorithm.off_policy_correction.geo_mask_low | 0.99 | =
trainer.algorithm.off_policy_correction.product_mask_high | 2.0 | =
trainer.algorithm.off_policy_correction.product_mask_low | 0.5 | =
trainer.algorithm.off_policy_correction.outlier_token_is_threshold_low | null | =
trainer.algorithm.off_policy_correction.outlier_token_is_threshold_high | null | =
trainer.algorithm.off_policy_correction.token_mask_is_threshold_low | null | =
trainer.algorithm.off_policy_correction.token_mask_is_threshold_high | null | =
trainer.algorithm.sapo.tau_pos | 1.0 | =
trainer.algorithm.sapo.tau_neg | 1.05 | =
trainer.algorithm.clip_cov.clip_ratio | 0.0002 | =
trainer.algorithm.clip_cov.clip_cov_lb | 1.0 | =
trainer.algorithm.clip_cov.clip_cov_ub | 5.0 | =
trainer.algorithm.kl_cov.kl_cov_frac | 0.2 | =
trainer.algorithm.kl_cov.ppo_kl_coef | 1.0 | =
trainer.algorithm.cispo.cispo_eps_clip_low | 1.0 | =
trainer.algorithm.cispo.cispo_eps_clip_high | 4.0 | =
trainer.algorithm.cispo.cispo_anchor || trainer.algorithm.policy_loss_type | old: cispo_old; rollout: cispo
trainer.algorithm.dppo.dppo_type | binary_tv | =
trainer.algorithm.dppo.delta_low | 0.2 | =
trainer.algorithm.dppo.delta_high | 0.2 | =
trainer.algorithm.dynamic_sampling.type | null | trainer.fully_async.sample_full_batch | null: false; filter: true | replace is not there
trainer.algorithm.dynamic_sampling.max_sample_batches || trainer.fully_async.max_filtered_in_a_row | 30: null; -1: 0
    | in groups, not batches: times trainer.policy_mini_batch_size; null is 30 mini-batches
trainer.algorithm.dynamic_sampling.min_replace_ratio ||| *: | dynamic_sampling.type=replace is not there
trainer.algorithm.max_seq_len | null | =
trainer.algorithm.overlong_buffer_len || =
trainer.algorithm.overlong_buffer_penalty_factor || =
trainer.mtp.* ||| false: | no multi-token prediction heads
trainer.fully_async.enabled || trainer.schedule | true: fully_async; false: sync | ours is fully_async by default
trainer.fully_async.max_staleness_steps || trainer.max_staleness_steps || both names are taken
trainer.fully_async.num_parallel_generation_workers || trainer.num_parallel_generation_workers || both names are taken
trainer.fully_async.sample_full_batch | false | =
trainer.fully_async.clear_kv_cache_on_weight_sync ||| true: | always: no key-value cache outlives its weights, see engine.pause_mode
trainer.fully_async.simulate_training, trainer.fully_async.simulate_training_step_seconds, trainer.fully_async.simulate_weight_sync_seconds
    ||| false: | skyrl_async.simulator runs the loop in virtual time
trainer.gradient_checkpointing | true | training.activation_checkpointing
trainer.gradient_checkpointing_use_reentrant ||| *: | never reentrant
trainer.seed | 42 | =
trainer.resume_mode | latest | = | null: none
trainer.resume_path | null | =
trainer.log_path ||| *: | run.log in trainer.output_dir
trainer.ckpt_path | ~/ckpts/ | trainer.output_dir || checkpoints and everything else of the run; SkyRL's checkpoints cannot be read
trainer.max_ckpts_to_keep | -1 | trainer.max_checkpoints_to_keep | -1: 0
trainer.ckpt_interval | 10 | trainer.checkpoint_interval_steps | -1: 0 | and one at the end; SkyRL also saves at the end of each epoch
trainer.hf_save_interval || trainer.export_hf | -1: false; 0: false; *: true | once, at the end
trainer.export_path ||| *: | policy/ in trainer.output_dir, see trainer.export_hf
trainer.bf16 | true | training.mixed_precision
trainer.epochs | 1 | trainer.num_epochs || with trainer.num_steps=null
trainer.max_training_steps | null | trainer.num_steps
trainer.update_epochs_per_batch ||| 1: | each group is trained once
trainer.train_batch_size ||| *: | trainer.policy_mini_batch_size, to which SkyRL's fully asynchronous trainer wants it equal
trainer.policy_mini_batch_size | 256 | =
trainer.micro_train_batch_size_per_gpu, trainer.micro_forward_batch_size_per_gpu || training.micro_batch_tokens
    || in tokens, not samples: times the longest prompt plus answer
trainer.max_tokens_per_microbatch || training.micro_batch_tokens | -1: | of trained tokens and prompts, padding included
trainer.recompute_old_logprobs_per_minibatch ||| *: | policy_loss_type=decoupled_ppo or cispo_old recomputes log-probs when a group is finished
trainer.update_ref_every_epoch ||| false: | the reference stays as it is
trainer.remove_microbatch_padding, trainer.use_sample_packing | true | training.use_sample_packing
trainer.eval_batch_size || evaluation.max_concurrent || prompts evaluated at once
trainer.eval_before_train | true | =
trainer.eval_interval | 5 | trainer.eval_interval_steps
    | -1: trainer.eval_interval_steps=0 trainer.eval_before_train=false trainer.eval_at_end=false;
      0: trainer.eval_interval_steps=0 trainer.eval_before_train=false trainer.eval_at_end=false
    | -1 in SkyRL leaves out the evaluations before and after training, too (trainer.eval_before_train, trainer.eval_at_end)
trainer.max_prompt_length |||| prompts that leave no room in engine.max_model_len are left out; for less, filter the files
trainer.flash_attn, trainer.disable_fast_tokenizer ||| *: | transformers chooses
trainer.project_name || logging.wandb_project
trainer.run_name ||| *: | the name of trainer.output_dir
trainer.logger | wandb | | wandb: logging.wandb=true; tensorboard: logging.tensorboard=true; console: logging.console=true
    | no MLflow, no SwanLab
trainer.tags |||| W&B runs have the run directory's name, and no tags
trainer.enable_ray_gpu_monitor ||| *: | W&B records the machine
trainer.dump_data_batch || logging.trained_tokens
trainer.dump_eval_results ||| *: | evaluation figures are in metrics.jsonl
trainer.print_example_interval, trainer.log_example_interval, trainer.num_logger_train_samples, trainer.num_logger_eval_samples ||| *:
    | no sample texts in the log; logging.trained_groups and logging.trained_tokens write what was trained
trainer.logprobs_chunk_size | 1024 | training.logprobs_chunk_size
trainer.vocab_entropy_chunk_size, trainer.vocab_entropy_chunk_memory_mb, trainer.fused_lm_head_logprob,
    trainer.fused_lm_head_logprob_backend ||| *: | of Megatron, which there is not
trainer.rope_scaling, trainer.rope_theta, generator.rope_scaling, generator.rope_theta ||| null:
    | change config.json in the directory of policy.path
generator.inference_engine.num_engines, generator.num_inference_engines | 1 | engine.num_engines
generator.inference_engine.tensor_parallel_size, generator.inference_engine_tensor_parallel_size | 1 | engine.tensor_parallel_size
generator.inference_engine.pipeline_parallel_size, generator.inference_engine_pipeline_parallel_size,
    generator.inference_engine.expert_parallel_size, generator.inference_engine_expert_parallel_size ||| 1: | engines are tensor-parallel only
generator.inference_engine.data_parallel_size, generator.inference_engine_data_parallel_size ||| 1: | more engines: engine.num_engines
generator.inference_engine.backend, generator.backend | vllm | engine.backend || no SGLang
generator.inference_engine.run_engines_locally, generator.run_engines_locally ||| true: | engines are started by the run
generator.inference_engine.external_proxy_url, generator.inference_engine.external_server_urls, generator.external_proxy_url,
    generator.external_server_urls, generator.remote_inference_engine_urls, generator.inference_engine.remote_urls ||| null:
    | engines are started by the run
generator.inference_engine.weight_sync_backend, generator.weight_sync_backend | nccl | weight_sync.transfer | nccl: auto; gloo: auto
    | auto is shared memory on the trainer's machine and NCCL to others; nccl broadcasts to all; no delta
generator.inference_engine.delta_weight_sync.* |||| every publish is of all weights; policy.lora.publish=adapter is small
generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB, generator.weight_transfer_threshold_cuda_ipc_GB ||| *:
    | weight_sync.send_bucket_mb, in MiB
generator.inference_engine.override_existing_update_group, generator.override_existing_update_group ||| *: | groups are made anew when needed
generator.inference_engine.model_dtype, generator.model_dtype | bfloat16 | policy.dtype
generator.model_name ||| *: | policy.path
generator.inference_engine.enforce_eager, generator.enforce_eager | false | engine.enforce_eager
generator.inference_engine.enable_prefix_caching, generator.enable_prefix_caching | true | engine.enable_prefix_caching
generator.inference_engine.enable_chunked_prefill, generator.enable_chunked_prefill || engine.extra_args.enable_chunked_prefill | true:
generator.inference_engine.max_num_batched_tokens, generator.max_num_batched_tokens || engine.extra_args.max_num_batched_tokens
generator.inference_engine.max_num_seqs, generator.max_num_seqs | 1024 | engine.max_num_seqs
generator.inference_engine.gpu_memory_utilization, generator.gpu_memory_utilization | 0.8 | engine.gpu_memory_utilization
generator.inference_engine.fully_sharded_loras, generator.fully_sharded_loras || engine.extra_args.fully_sharded_loras | false:
generator.inference_engine.engine_init_kwargs.*, generator.engine_init_kwargs.* || engine.extra_args.*
generator.inference_engine.speculative_config.* |||| no speculative decoding
generator.inference_engine.enable_return_routed_experts ||| false: | no replay of expert routing
generator.inference_engine.offload_kv_for_weight_sync ||| false: | no key-value cache outlives its weights
generator.inference_engine.language_model_only ||| false: | text only
generator.inference_engine.served_model_name, generator.served_model_name || server.model_name | null:
generator.inference_engine.enable_http_endpoint, generator.enable_http_endpoint || server.enabled
generator.http_endpoint_host, generator.inference_engine.http_endpoint_host || server.host
generator.http_endpoint_port, generator.inference_engine.http_endpoint_port || server.port
generator.inference_engine.async_engine, generator.async_engine, generator.inference_engine.vllm_v1_disable_multiproc,
    generator.vllm_v1_disable_multiproc, generator.inference_engine.distributed_executor_backend,
    generator.inference_engine.enable_ray_prometheus_stats, generator.enable_ray_prometheus_stats ||| *: | an engine is an asynchronous vLLM
    engine in a Ray actor
generator.inference_engine.enable_pd, generator.inference_engine.num_prefill ||| false:; 0: | every engine does prefill and decoding
generator.inference_engine.router_init_kwargs.* ||| *: | requests are spread by engine.oldest_request_weight
generator.n_samples_per_prompt | 5 | =
generator.batched ||| *: | every sample is a request of its own
generator.max_turns | 1 | =
generator.max_input_length |||| engine.max_model_len bounds prompt plus answer, generator.max_trajectory_tokens an episode
generator.chat_template.*, generator.chat_template_kwargs.* |||| the template is of the tokenizer in policy.path; change it there
generator.sampling_params.max_generate_length | 1024 | generator.sampling.max_tokens
generator.sampling_params.temperature | 1.0 | generator.sampling.temperature
generator.sampling_params.top_p | 1.0 | generator.sampling.top_p
generator.sampling_params.min_p | 0.0 | generator.sampling.min_p
generator.sampling_params.top_k | -1 | generator.sampling.top_k | -1: 0
generator.sampling_params.stop | null | generator.sampling.stop
generator.sampling_params.repetition_penalty, generator.eval_sampling_params.repetition_penalty ||| 1.0:; 1:
    | no penalty: log-probs would not be the policy's
generator.sampling_params.logprobs, generator.eval_sampling_params.logprobs ||| *: | those of sampled tokens always come back
generator.sampling_params.additional_kwargs.*, generator.eval_sampling_params.additional_kwargs.* |||| generator.sampling has all that there is
generator.eval_sampling_params.max_generate_length || evaluation.sampling.max_tokens || SkyRL's default is that of training
generator.eval_sampling_params.temperature | 0.0 | evaluation.sampling.temperature
generator.eval_sampling_params.top_p | 1.0 | evaluation.sampling.top_p
generator.eval_sampling_params.min_p | 0.0 | evaluation.sampling.min_p
generator.eval_sampling_params.top_k | -1 | evaluation.sampling.top_k | -1: 0
generator.eval_sampling_params.stop | null | evaluation.sampling.stop
generator.eval_n_samples_per_prompt | 1 | evaluation.n_samples_per_prompt
generator.use_conversation_multi_turn ||| true: | every turn is a message
generator.append_eos_token_after_stop_str_in_multi_turn ||| *: | a turn ends as its chat template says
generator.zero_reward_on_non_stop ||| false: | give these a reward by trainer.algorithm.reward_shaping; generator.apply_overlong_filtering masks them
generator.use_cache_salt ||| *: | the prefix cache is dropped at each weight update
generator.apply_overlong_filtering | false | =
generator.step_wise_trajectories, generator.merge_stepwise_output ||| *: | turns of an episode are one row; a rewritten history begins another
generator.vision_language_generator ||| false: | text only
environment.env_class | gsm8k | task.env_class
environment.skyrl_gym.* |||| environments get their rows' columns; for settings, name a class of your own (module:Class) in task.env_class
"""  # noqa: E501

_VERL = """
data.train_files || task.train_files || with task=dataset; columns prompt, env_class and reward_spec in place of verl's reward_model
data.val_files || task.eval_files || the first evaluation.num_prompts (between steps num_prompts_while_training) are used; verl uses all
data.max_response_length | 512 | generator.sampling.max_tokens || of a turn; generator.max_trajectory_tokens is of an episode
data.max_prompt_length, data.filter_overlong_prompts, data.truncation |||| prompts that leave no room in engine.max_model_len are left out
data.train_batch_size ||| *: | trainer.policy_mini_batch_size; verl's fully asynchronous trainer does not read it
data.gen_batch_size, data.val_batch_size, data.return_raw_chat, data.shuffle ||| *: | prompts are shuffled and generated one by one
data.prompt_key, data.reward_fn_key ||| prompt: | the column prompt; the column env_class says who judges
data.seed || trainer.seed
data.trust_remote_code || policy.trust_remote_code
data.custom_cls.* |||| write files that task.train_files can name
actor_rollout_ref.hybrid_engine ||| false: | engines have devices of their own; placement.groups shares them
actor_rollout_ref.model.path || policy.path || with policy=hf; a local directory
actor_rollout_ref.model.lora_rank | 0 | policy.lora.rank
actor_rollout_ref.model.lora_alpha | 16 | policy.lora.alpha
actor_rollout_ref.model.target_modules | all-linear | policy.lora.target_modules
actor_rollout_ref.model.exclude_modules | null | policy.lora.exclude_modules
actor_rollout_ref.model.use_remove_padding | true | training.use_sample_packing
actor_rollout_ref.model.enable_gradient_checkpointing | true | training.activation_checkpointing
actor_rollout_ref.model.trust_remote_code | false | policy.trust_remote_code
actor_rollout_ref.model.override_config.* |||| change config.json in the directory of policy.path
actor_rollout_ref.model.use_liger, actor_rollout_ref.model.use_fused_kernels ||| false: | the model is trained as transformers has it
actor_rollout_ref.actor.strategy | fsdp | training.backend | fsdp2: fsdp | fsdp or deepspeed; no Megatron
actor_rollout_ref.actor.ppo_mini_batch_size | 256 | trainer.policy_mini_batch_size || prompts
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, actor_rollout_ref.actor.ppo_micro_batch_size,
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu, actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
    || training.micro_batch_tokens || in tokens, not samples
actor_rollout_ref.actor.ppo_max_token_len_per_gpu | 16384 | training.micro_batch_tokens
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu, actor_rollout_ref.ref.log_prob_max_token_len_per_gpu || training.micro_batch_tokens
actor_rollout_ref.actor.use_dynamic_bsz, actor_rollout_ref.rollout.log_prob_use_dynamic_bsz, actor_rollout_ref.ref.log_prob_use_dynamic_bsz
    ||| *: | micro-batches are always filled by tokens
actor_rollout_ref.actor.clip_ratio || trainer.algorithm.eps_clip_low || and eps_clip_high
actor_rollout_ref.actor.clip_ratio_low | 0.2 | trainer.algorithm.eps_clip_low
actor_rollout_ref.actor.clip_ratio_high | 0.2 | trainer.algorithm.eps_clip_high
actor_rollout_ref.actor.clip_ratio_c | 3.0 | trainer.algorithm.clip_ratio_c || with policy_loss_type=dual_clip
actor_rollout_ref.actor.policy_loss.loss_mode | vanilla | trainer.algorithm.policy_loss_type | vanilla: dual_clip
    | verl's vanilla is dual_clip; with async_training.compute_prox_log_prob: decoupled_ppo
actor_rollout_ref.actor.policy_loss.clip_cov_ratio || trainer.algorithm.clip_cov.clip_ratio
actor_rollout_ref.actor.policy_loss.clip_cov_lb || trainer.algorithm.clip_cov.clip_cov_lb
actor_rollout_ref.actor.policy_loss.clip_cov_ub || trainer.algorithm.clip_cov.clip_cov_ub
actor_rollout_ref.actor.policy_loss.kl_cov_ratio | 0.0002 | trainer.algorithm.kl_cov.kl_cov_frac
actor_rollout_ref.actor.policy_loss.ppo_kl_coef | 0.1 | trainer.algorithm.kl_cov.ppo_kl_coef
actor_rollout_ref.actor.tau_pos | 1.0 | trainer.algorithm.sapo.tau_pos
actor_rollout_ref.actor.tau_neg | 1.05 | trainer.algorithm.sapo.tau_neg
actor_rollout_ref.actor.loss_agg_mode | token-mean | trainer.algorithm.loss_reduction | token-mean: token_mean;
      seq-mean-token-sum: seq_mean_token_sum; seq-mean-token-mean: seq_mean_token_mean; seq-mean-token-sum-norm: seq_mean_token_sum_norm
actor_rollout_ref.actor.entropy_coeff || trainer.algorithm.entropy_loss_coef | 0: | with use_entropy_loss=true
actor_rollout_ref.actor.use_kl_loss | false | trainer.algorithm.use_kl_loss
actor_rollout_ref.actor.kl_loss_coef | 0.001 | trainer.algorithm.kl_loss_coef
actor_rollout_ref.actor.kl_loss_type | low_var_kl | trainer.algorithm.kl_estimator_type | low_var_kl: k3; kl: k1; mse: k2
actor_rollout_ref.actor.ppo_epochs ||| 1: | each group is trained once
actor_rollout_ref.actor.grad_clip, actor_rollout_ref.actor.optim.clip_grad | 1.0 | training.max_grad_norm
actor_rollout_ref.actor.optim.lr | 1.0e-6 | training.lr
actor_rollout_ref.actor.optim.lr_warmup_steps | -1 | training.num_warmup_steps | -1: 0
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio || training.num_warmup_steps | 0.0: | a number of steps
actor_rollout_ref.actor.optim.weight_decay | 0.01 | training.weight_decay
actor_rollout_ref.actor.optim.betas | [0.9, 0.999] | training.adam_beta1 training.adam_beta2
actor_rollout_ref.actor.optim.lr_scheduler_type | constant | training.lr_schedule
actor_rollout_ref.actor.optim.warmup_style || training.lr_schedule
actor_rollout_ref.actor.fsdp_config.param_offload, actor_rollout_ref.actor.fsdp_config.optimizer_offload,
    actor_rollout_ref.actor.fsdp_config.offload_policy | false | training.cpu_offload || parameters, gradients and optimizer together
actor_rollout_ref.actor.fsdp_config.fsdp_size ||| *: | always sharded over all ranks
actor_rollout_ref.actor.ulysses_sequence_parallel_size, actor_rollout_ref.ref.ulysses_sequence_parallel_size ||| 1: | no sequence parallelism
actor_rollout_ref.ref.fsdp_config.* ||| *: | the reference is sharded as the policy is
actor_rollout_ref.rollout.name || engine.backend || no SGLang
actor_rollout_ref.rollout.n | 1 | generator.n_samples_per_prompt
rollout.n | 4 | generator.n_samples_per_prompt
actor_rollout_ref.rollout.temperature | 1.0 | generator.sampling.temperature
actor_rollout_ref.rollout.top_p | 1 | generator.sampling.top_p
actor_rollout_ref.rollout.top_k | -1 | generator.sampling.top_k | -1: 0
actor_rollout_ref.rollout.val_kwargs.temperature | 0 | evaluation.sampling.temperature
actor_rollout_ref.rollout.val_kwargs.top_p | 1.0 | evaluation.sampling.top_p
actor_rollout_ref.rollout.val_kwargs.top_k | -1 | evaluation.sampling.top_k | -1: 0
actor_rollout_ref.rollout.val_kwargs.n | 1 | evaluation.n_samples_per_prompt
actor_rollout_ref.rollout.val_kwargs.do_sample || evaluation.sampling.temperature || 0 is greedy
actor_rollout_ref.rollout.gpu_memory_utilization | 0.5 | engine.gpu_memory_utilization
actor_rollout_ref.rollout.tensor_model_parallel_size | 2 | engine.tensor_parallel_size
actor_rollout_ref.rollout.enforce_eager | false | engine.enforce_eager
actor_rollout_ref.rollout.max_num_seqs | 256 | engine.max_num_seqs
actor_rollout_ref.rollout.max_model_len | null | engine.max_model_len
actor_rollout_ref.rollout.max_num_batched_tokens || engine.extra_args.max_num_batched_tokens
actor_rollout_ref.rollout.enable_chunked_prefill || engine.extra_args.enable_chunked_prefill | true:
actor_rollout_ref.rollout.enable_prefix_caching | true | engine.enable_prefix_caching
actor_rollout_ref.rollout.dtype | bfloat16 | policy.dtype
actor_rollout_ref.rollout.engine_kwargs.vllm.* || engine.extra_args.*
actor_rollout_ref.rollout.mode, actor_rollout_ref.rollout.calculate_log_probs, actor_rollout_ref.rollout.load_format,
    actor_rollout_ref.rollout.layered_summon, actor_rollout_ref.rollout.free_cache_engine ||| *: | always asynchronous, with the log-probs of
    sampled tokens
actor_rollout_ref.rollout.multi_turn.enable, actor_rollout_ref.rollout.multi_turn.max_assistant_turns,
    actor_rollout_ref.rollout.multi_turn.max_user_turns || generator.max_turns
actor_rollout_ref.rollout.multi_turn.tool_config_path, actor_rollout_ref.rollout.agent.* |||| generator=agent runs any harness with its tools;
    environments of skyrl_gym bring theirs
actor_rollout_ref.rollout.checkpoint_engine.*, async_training.checkpoint_engine.* ||| *: | weight_sync.transfer, weight_sync.send_bucket_mb
algorithm.adv_estimator | gae | trainer.algorithm.advantage_estimator | reinforce_plus_plus: reinforce++;
      reinforce_plus_plus_baseline: reinforce++_baseline | gae needs a critic, which there is not
algorithm.norm_adv_by_std_in_grpo | true | trainer.algorithm.grpo_norm_by_std
algorithm.gamma, algorithm.lam ||| *: | there is no critic: advantages are of groups of samples
algorithm.use_kl_in_reward | false | trainer.algorithm.use_kl_in_reward
algorithm.kl_penalty || trainer.algorithm.kl_estimator_type | low_var_kl: k3; kl: k1; mse: k2 | in the reward, with use_kl_in_reward=true
algorithm.kl_ctrl.kl_coef || trainer.algorithm.kl_loss_coef || with use_kl_in_reward=true
algorithm.kl_ctrl.type | fixed | trainer.algorithm.kl_ctrl.type
algorithm.kl_ctrl.horizon | 10000 | trainer.algorithm.kl_ctrl.horizon
algorithm.kl_ctrl.target_kl | 0.1 | trainer.algorithm.kl_ctrl.kl_target
algorithm.rollout_correction.rollout_is | null | trainer.algorithm.off_policy_correction.tis_ratio_type || with policy_loss_type=decoupled_ppo
algorithm.rollout_correction.rollout_is_threshold | 2.0 | trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high
    || with rollout_is=sequence: sequence_tis_ratio_clip_high
algorithm.rollout_correction.rollout_rs, algorithm.rollout_correction.rollout_rs_threshold ||| null:
    | masks by ratios: off_policy_correction.sequence_mask_metric, token_mask_is_threshold_high
algorithm.rollout_correction.bypass_mode || trainer.algorithm.policy_loss_type | false: decoupled_ppo; true: ppo_clip
critic.* ||| *: | there is no critic: advantages are of groups of samples
custom_reward_function.path, custom_reward_function.name || task.reward || package.module:function
reward_model.reward_manager ||| *: | task.reward, or the environment in the column env_class
reward_model.reward_kwargs.overlong_buffer_cfg.len || trainer.algorithm.overlong_buffer_len
reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor || trainer.algorithm.overlong_buffer_penalty_factor
reward_model.reward_kwargs.overlong_buffer_cfg.enable, reward_model.reward_kwargs.overlong_buffer_cfg.log ||| *:
    | trainer.algorithm.overlong_buffer_len=0 is none
reward_model.reward_kwargs.max_resp_len || generator.max_trajectory_tokens
reward_model.* |||| no reward model of its own: task.reward may ask one
trainer.nnodes, trainer.n_gpus_per_node || training.num_workers || GPUs of all nodes together
trainer.total_epochs | 30 | trainer.num_epochs || with trainer.num_steps=null
rollout.total_epochs | 10 | trainer.num_epochs || with trainer.num_steps=null
trainer.total_training_steps | null | trainer.num_steps
trainer.project_name || logging.wandb_project
trainer.experiment_name ||| *: | the name of trainer.output_dir
trainer.logger || | wandb: logging.wandb=true; tensorboard: logging.tensorboard=true; console: logging.console=true
    | MLflow, SwanLab and others are not there
trainer.val_before_train | true | trainer.eval_before_train
trainer.val_only | false | trainer.eval_only
trainer.test_freq | -1 | trainer.eval_interval_steps | -1: 0
rollout.test_freq | 1 | trainer.eval_interval_steps || in optimizer steps, not publishes
trainer.save_freq | -1 | trainer.checkpoint_interval_steps | -1: 0
trainer.default_local_dir || trainer.output_dir || verl's checkpoints cannot be read
trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep | null | trainer.max_checkpoints_to_keep | null: 0
trainer.resume_mode | auto | = | auto: latest; disable: none; resume_path: from_path
trainer.resume_from_path || trainer.resume_path
trainer.device || training.device
trainer.critic_warmup ||| *: | there is no critic
trainer.balance_batch ||| *: | rows are always spread by their tokens
rollout.nnodes, rollout.n_gpus_per_node || engine.num_engines || GPUs of all nodes over engine.tensor_parallel_size
rollout.total_rollout_steps || trainer.num_steps || in optimizer steps, not prompts: over trainer.policy_mini_batch_size
async_training.staleness_threshold || trainer.max_staleness_steps || in optimizer steps, not a share of the prompts between two publishes; a share
    of 1 is about trainer.schedule=one_step_off
async_training.trigger_parameter_sync_step || trainer.publish_every_steps
async_training.require_batches ||| *: | a mini-batch is trained as its groups are finished, see trainer.stream_mini_batch
async_training.partial_rollout ||| true: | always: requests in flight go on after a publish, see engine.pause_mode
async_training.use_rollout_log_probs || trainer.algorithm.policy_loss_type | true: dual_clip; false: decoupled_ppo
async_training.compute_prox_log_prob || trainer.algorithm.policy_loss_type | true: decoupled_ppo; false: dual_clip
async_training.use_trainer_do_validate ||| false: | engines evaluate
"""  # noqa: E501

_AREAL = """
experiment_name, trial_name ||| *: | the name of trainer.output_dir
seed | 1 | trainer.seed
total_train_epochs | 1 | trainer.num_epochs || with trainer.num_steps=null
total_train_steps | null | trainer.num_steps
total_train_n_seqs |||| trainer.num_steps
tokenizer_path ||| *: | the tokenizer is in policy.path
dynamic_bs ||| false: | every mini-batch is full, see trainer.fully_async.sample_full_batch
enable_offload || training.cpu_offload
cluster.n_nodes, cluster.n_gpus_per_node |||| training.num_workers and engine.num_engines
cluster.fileroot || trainer.output_dir
cluster.name_resolve.*, scheduler.*, allocation_mode, perf_tracer.*, memory_profiler.* ||| *: | Ray starts the processes, see
    placement.ray_address; logging.trace
train_dataset.path || task.train_files || with task=dataset; files or directories on this machine
train_dataset.batch_size | 1 | trainer.policy_mini_batch_size || over actor.ppo_n_minibatches
train_dataset.max_length |||| prompts that leave no room in engine.max_model_len are left out
train_dataset.* ||| *: | prompts are read once and shuffled, in the trainer's process
valid_dataset.path || task.eval_files
valid_dataset.* ||| *: | evaluation.num_prompts
gconfig.n_samples | 1 | generator.n_samples_per_prompt
gconfig.max_new_tokens | 16384 | generator.sampling.max_tokens
actor.max_new_tokens || generator.sampling.max_tokens
gconfig.max_tokens || engine.max_model_len
gconfig.temperature, actor.temperature | 1.0 | generator.sampling.temperature
gconfig.top_p | 1.0 | generator.sampling.top_p
gconfig.top_k | 100000000 | generator.sampling.top_k | 100000000: 0
gconfig.stop | null | generator.sampling.stop
gconfig.greedy ||| false: | training needs samples; evaluation.sampling.temperature may be 0
gconfig.* |||| generator.sampling has all that there is
eval_gconfig.n_samples || evaluation.n_samples_per_prompt
eval_gconfig.temperature || evaluation.sampling.temperature
eval_gconfig.max_new_tokens || evaluation.sampling.max_tokens
eval_gconfig.* |||| evaluation.sampling has all that there is
rollout.max_head_offpolicyness | 0 | trainer.max_staleness_steps
rollout.max_concurrent_rollouts || trainer.num_parallel_generation_workers || groups, from a mini-batch to a mini-batch * (max_staleness_steps + 1)
rollout.consumer_batch_size || trainer.policy_mini_batch_size
rollout.queue_size ||| *: | the staleness bound is the bound
rollout.backend || engine.num_engines || engine.tensor_parallel_size is the t of vllm:d4t1; no SGLang
rollout.setup_timeout | 300.0 | engine.start_timeout_s
rollout.request_retries | 3 | generator.max_retries
rollout.request_timeout || generator.rollout_timeout_s
rollout.pause_grace_period ||| *: | requests in flight go on after a publish, see engine.pause_mode
rollout.use_lora || policy.lora.rank || 0 is none
rollout.agent.* || generator.entrypoint || with generator=agent
rollout.dump_to_file || logging.trained_groups
rollout.experiment_name, rollout.trial_name, rollout.fileroot, rollout.tokenizer_path, rollout.scheduling_spec.*, rollout.enable_rollout_tracing
    ||| *: | engines get what they need from engine.* and trainer.output_dir
actor.path || policy.path || with policy=hf; a local directory
actor.backend || training.num_workers || ranks, the d of fsdp:d4; training.backend is fsdp or deepspeed
actor.dtype | bfloat16 | training.mixed_precision | bfloat16: true; float32: false
actor.gradient_checkpointing | false | training.activation_checkpointing
actor.offload | false | training.cpu_offload
actor.mb_spec.max_tokens_per_mb | null | training.micro_batch_tokens
actor.mb_spec.* ||| *: | micro-batches are filled by tokens
actor.optimizer.lr | 0.001 | training.lr
actor.optimizer.weight_decay | 0.01 | training.weight_decay
actor.optimizer.beta1 | 0.9 | training.adam_beta1
actor.optimizer.beta2 | 0.999 | training.adam_beta2
actor.optimizer.lr_scheduler_type | constant | training.lr_schedule
actor.optimizer.warmup_steps_proportion || training.num_warmup_steps || a number of steps
actor.optimizer.gradient_clipping | 1.0 | training.max_grad_norm
actor.optimizer.* ||| *: | AdamW
actor.ppo_n_minibatches || trainer.policy_mini_batch_size || train_dataset.batch_size over it
actor.eps_clip | 0.2 | trainer.algorithm.eps_clip_low || and eps_clip_high, where eps_clip_higher is null
actor.eps_clip_higher || trainer.algorithm.eps_clip_high | null:
actor.c_clip || trainer.algorithm.clip_ratio_c | null: | with policy_loss_type=dual_clip
actor.m2_threshold | null | trainer.algorithm.off_policy_correction.m2_threshold
actor.use_decoupled_loss || trainer.algorithm.policy_loss_type | true: decoupled_ppo; false: ppo_clip
actor.recompute_logprob ||| *: | policy_loss_type=decoupled_ppo recomputes
actor.prox_logp_method ||| recompute: | decoupled_ppo recomputes; rollout_is does without
actor.rejection_sampling.upper || trainer.algorithm.off_policy_correction.token_mask_is_threshold_high
    || level=token, action=mask, metric=ratio; with action=clamp: tis_ratio_type=token and token_tis_ratio_clip_high
actor.rejection_sampling.lower || trainer.algorithm.off_policy_correction.token_mask_is_threshold_low
actor.rejection_sampling.* |||| see trainer.algorithm.off_policy_correction
actor.behave_imp_weight_cap || trainer.algorithm.off_policy_correction.token_mask_is_threshold_high
actor.importance_sampling_level || trainer.algorithm.policy_loss_type | token: ppo_clip; sequence: gspo
actor.use_sapo_loss || trainer.algorithm.policy_loss_type | true: sapo; false: ppo_clip
actor.sapo_tau_pos | 1.0 | trainer.algorithm.sapo.tau_pos
actor.sapo_tau_neg | 1.05 | trainer.algorithm.sapo.tau_neg
actor.kl_ctl | 0.1 | trainer.algorithm.kl_loss_coef || with use_kl_in_reward=true; none without a ref in AReaL
actor.kl_estimator | k1 | trainer.algorithm.kl_estimator_type
actor.reward_norm.*, actor.adv_norm.* || trainer.algorithm.advantage_estimator || grpo: mean and deviation of the group; dr_grpo: its mean;
    reinforce++_baseline: mean of the group, deviation of the mini-batch
actor.reward_scaling, actor.reward_bias, actor.reward_clip |||| trainer.algorithm.reward_shaping, a function of yours
actor.overlong_reward_penalty, actor.overlong_tokens || trainer.algorithm.overlong_buffer_len
actor.overlong_penalty_factor || trainer.algorithm.overlong_buffer_penalty_factor
actor.mask_no_eos_with_zero || generator.apply_overlong_filtering || theirs gives such answers a reward of 0, ours masks them
actor.discount, actor.gae_lambda ||| *: | there is no critic: advantages are of groups of samples
actor.weight_update_mode || weight_sync.transfer | xccl: auto | disk is not there: shared memory, or a broadcast
actor.use_lora, actor.lora_rank || policy.lora.rank || 0 is none
actor.lora_alpha | 16 | policy.lora.alpha
actor.target_modules || policy.lora.target_modules
actor.megatron.*, actor.archon.* |||| training=fsdp or training=deepspeed
actor.experiment_name, actor.trial_name, actor.scheduling_spec.*, actor.init_from_scratch, actor.disable_dropout, actor.attn_impl ||| *:
    | ranks get what they need from training.* and trainer.output_dir; no dropout
ref.path || trainer.ref.path || null: the policy that training began with
ref.* ||| *: | the reference is sharded as the policy is
critic.* ||| *: | there is no critic: advantages are of groups of samples
teacher.* |||| no distillation
vllm.max_num_seqs | 256 | engine.max_num_seqs
vllm.max_model_len | 32768 | engine.max_model_len
vllm.gpu_memory_utilization | 0.9 | engine.gpu_memory_utilization
vllm.enforce_eager | false | engine.enforce_eager
vllm.* || engine.extra_args.*
sglang.* |||| engines are vLLM
saver.freq_steps, recover.freq_steps | null | trainer.checkpoint_interval_steps | null: 0
recover.mode | disabled | trainer.resume_mode | on: latest; auto: latest; off: none; disabled: none
evaluator.freq_steps | null | trainer.eval_interval_steps | null: 0
evaluator.eval_before_train | false | trainer.eval_before_train
saver.*, recover.*, evaluator.* |||| intervals are in optimizer steps
stats_logger.wandb.mode || logging.wandb | disabled: false; online: true
stats_logger.wandb.project || logging.wandb_project
stats_logger.* ||| *: | logging.*
"""  # noqa: E501


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Another trainer, whose keys people know."""

    name: str
    source: str
    """Which state of it the table was made from."""
    table: str


SYSTEMS = (
    System(
        name="SkyRL",
        source="NovaSky-AI/SkyRL a956457 (2026-08-21); flat generator.* names: skyrl_train-v0.4.0",
        table=_SKYRL,
    ),
    System(
        name="verl",
        source="volcengine/verl b178a3c (2026-01-29, v0.7.0-125), verl/experimental/fully_async_policy",
        table=_VERL,
    ),
    System(
        name="AReaL", source="inclusionAI/AReaL 4aef98d (2026-05-21, v1.0.4-17), areal/api/cli_args.py", table=_AREAL
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A key of another system."""

    system: str
    name: str
    """As there; with ``.*`` at its end all keys below it."""
    default: str
    """As one would write it there; empty: none that says anything here."""
    ours: tuple[str, ...]
    """Our keys for it; empty: none."""
    values: dict[str, str]
    """Theirs -> ours where these differ; see the module."""
    note: str

    @property
    def answer(self) -> str:
        """What to do with it here, in a line."""
        meant = {
            theirs: ours
            for theirs, ours in self.values.items()
            if theirs != "*" and ours and not (self.ours and "=" in ours)
        }
        said = ", ".join(f"{ours} for {theirs}" for theirs, ours in meant.items())
        more = "; ".join(filter(None, (said, self.note)))
        return f"{' and '.join(self.ours)} ({more})" if self.ours and more else " and ".join(self.ours) or more

    @property
    def has_counterpart(self) -> bool:
        """Whether a key of ours does the same."""
        return bool(self.ours) or any("=" in ours for ours in self.values.values())

    def value_of(self, theirs: str) -> str | None:
        """What stands here for a value of theirs; empty: nothing needs setting; None: the table does not say."""
        return self.values.get(theirs, self.values.get("*"))


@cache
def foreign_keys(system: str) -> dict[str, Foreign]:
    """Every key of ``system`` in the table, by each of its spellings, in its order."""
    return {row.name: row for each in SYSTEMS if each.name == system for row in _rows(each)}


def yaml_value(written: str) -> Any:
    """A value as these systems read it: as omegaconf's yaml, in which 1e-6 is a number; text where it is no yaml."""
    try:
        value = OmegaConf.select(OmegaConf.from_dotlist([f"value={written}"]), "value")
    except (yaml.YAMLError, OmegaConfBaseException):
        return written
    return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value


def known_elsewhere(key: str) -> list[Foreign]:
    """What ``key`` is in each of the systems that have it."""
    return [row for system in SYSTEMS if (row := find(system.name, key))]


def ending_elsewhere(word: str) -> list[Foreign]:
    """Keys that end in ``word``, one of each system; none where they mean different things."""
    found = [row for each in SYSTEMS for row in foreign_keys(each.name).values() if row.name.rpartition(".")[2] == word]
    same = {row.answer for row in found}
    return list({row.system: row for row in found}.values()) if len(same) == 1 else []


def find(system: str, key: str) -> Foreign | None:
    """The row of ``key`` itself, or of the closest section above it that has one."""
    rows, above = foreign_keys(system), key
    if key in rows:
        return rows[key]
    while above:
        if row := rows.get(f"{above}.*"):
            below = key.removeprefix(above)  # with its dot, or empty
            return replace(row, name=key, default="", ours=tuple(name.replace(".*", below) for name in row.ours))
        above = above.rpartition(".")[0]
    return None


def _rows(system: System) -> Iterator[Foreign]:
    for line in system.table.strip().replace("\n ", " ").splitlines():
        names, default, ours, values, note = (part.strip() for part in [*line.split("|"), "", "", "", ""][:5])
        pairs = (
            pair.partition(": ") if ": " in pair else pair.partition(":") for pair in values.split(";") if pair.strip()
        )
        of_values = {theirs.strip(): " ".join(meant.split()) for theirs, _, meant in pairs}
        for name in names.split(","):
            keys = (name.strip(),) if ours == "=" else tuple(ours.split())
            yield Foreign(
                system=system.name,
                name=name.strip(),
                default=default,
                ours=keys,
                values=of_values,
                note=" ".join(note.split()),
            )
