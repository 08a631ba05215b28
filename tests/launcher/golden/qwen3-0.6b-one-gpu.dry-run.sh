# qwen3-0.6b-one-gpu: Qwen/Qwen3-0.6B, KV by push, vLLM 0.32.0+pd.1

# --- 127.0.0.1 (this machine) ---

# prefill-0: http://127.0.0.1:20000; side channel 20001; devices 0
env -u PYTHONHOME -u PYTHONPATH -u VLLM_CPU_KVCACHE_SPACE \
  CUDA_VISIBLE_DEVICES=0 \
  VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120 \
  VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 \
  VLLM_NIXL_SIDE_CHANNEL_PORT=20001 \
  VLLM_NO_USAGE_STATS=1 \
  /cache/engine/bin/vllm serve Qwen/Qwen3-0.6B \
  --served-model-name Qwen/Qwen3-0.6B \
  --host 127.0.0.1 \
  --port 20000 \
  --tensor-parallel-size 1 \
  --block-size 64 \
  --max-model-len 16384 \
  --kv-cache-memory-bytes 4294967296 \
  --gpu-memory-utilization 0.45 \
  --kv-transfer-config '{"kv_connector": "NixlPushConnector", "kv_role": "kv_producer", "kv_load_failure_policy": "fail"}' \
  --disable-access-log-for-endpoints /health,/metrics

# decode-0: http://127.0.0.1:20002; side channel 20003; devices 0
env -u PYTHONHOME -u PYTHONPATH -u VLLM_CPU_KVCACHE_SPACE \
  CUDA_VISIBLE_DEVICES=0 \
  VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120 \
  VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 \
  VLLM_NIXL_SIDE_CHANNEL_PORT=20003 \
  VLLM_NO_USAGE_STATS=1 \
  /cache/engine/bin/vllm serve Qwen/Qwen3-0.6B \
  --served-model-name Qwen/Qwen3-0.6B \
  --host 127.0.0.1 \
  --port 20002 \
  --tensor-parallel-size 1 \
  --block-size 64 \
  --max-model-len 16384 \
  --kv-cache-memory-bytes 4294967296 \
  --gpu-memory-utilization 0.45 \
  --kv-transfer-config '{"kv_connector": "NixlPushConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "fail"}' \
  --disable-access-log-for-endpoints /health,/metrics

# router: http://127.0.0.1:20004; metrics 20005
env -u PYTHONHOME -u PYTHONPATH -u VLLM_NIXL_SIDE_CHANNEL_SECRET \
  /cache/engine/bin/vllm-router \
  --vllm-pd-disaggregation \
  --policy round_robin \
  --host 127.0.0.1 \
  --port 20004 \
  --prometheus-host 127.0.0.1 \
  --prometheus-port 20005 \
  --prefill http://127.0.0.1:20000 \
  --decode http://127.0.0.1:20002 \
  --worker-startup-check-interval 1 \
  --health-check-interval-secs 1
