# tiny-qwen3-2p2d-cpu: tiny-qwen3, KV by push, vLLM 0.32.0+pd.1

# --- 127.0.0.1 (this machine) ---

# prefill-0: http://127.0.0.1:20000; side channel 20001; cores 0
env -u PYTHONHOME -u PYTHONPATH -u VLLM_CPU_KVCACHE_SPACE \
  HF_HUB_OFFLINE=1 \
  VLLM_CPU_OMP_THREADS_BIND=0 \
  VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120 \
  VLLM_MQ_BUSY_LOOP_SECONDS=0.001 \
  VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 \
  VLLM_NIXL_SIDE_CHANNEL_PORT=20001 \
  VLLM_NO_USAGE_STATS=1 \
  PYTHONPATH=/pdlaunch/engine_middleware \
  /cache/engine/bin/vllm serve /cache/models/tiny-qwen3 \
  --served-model-name tiny-qwen3 \
  --host 127.0.0.1 \
  --port 20000 \
  --tensor-parallel-size 1 \
  --block-size 32 \
  --max-model-len 8192 \
  --kv-cache-memory-bytes 1073741824 \
  --kv-transfer-config '{"kv_connector": "NixlPushConnector", "kv_role": "kv_producer", "kv_load_failure_policy": "fail"}' \
  --disable-access-log-for-endpoints /health,/metrics \
  --enforce-eager \
  --dtype float32 \
  --max-num-batched-tokens 256 \
  --middleware pdlaunch_drain.Drain

# prefill-1: http://127.0.0.1:20002; side channel 20003; cores 1
env -u PYTHONHOME -u PYTHONPATH -u VLLM_CPU_KVCACHE_SPACE \
  HF_HUB_OFFLINE=1 \
  VLLM_CPU_OMP_THREADS_BIND=1 \
  VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120 \
  VLLM_MQ_BUSY_LOOP_SECONDS=0.001 \
  VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 \
  VLLM_NIXL_SIDE_CHANNEL_PORT=20003 \
  VLLM_NO_USAGE_STATS=1 \
  PYTHONPATH=/pdlaunch/engine_middleware \
  /cache/engine/bin/vllm serve /cache/models/tiny-qwen3 \
  --served-model-name tiny-qwen3 \
  --host 127.0.0.1 \
  --port 20002 \
  --tensor-parallel-size 1 \
  --block-size 32 \
  --max-model-len 8192 \
  --kv-cache-memory-bytes 1073741824 \
  --kv-transfer-config '{"kv_connector": "NixlPushConnector", "kv_role": "kv_producer", "kv_load_failure_policy": "fail"}' \
  --disable-access-log-for-endpoints /health,/metrics \
  --enforce-eager \
  --dtype float32 \
  --max-num-batched-tokens 256 \
  --middleware pdlaunch_drain.Drain

# decode-0: http://127.0.0.1:20004; side channel 20005; cores 2
env -u PYTHONHOME -u PYTHONPATH -u VLLM_CPU_KVCACHE_SPACE \
  HF_HUB_OFFLINE=1 \
  VLLM_CPU_OMP_THREADS_BIND=2 \
  VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120 \
  VLLM_MQ_BUSY_LOOP_SECONDS=0.001 \
  VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 \
  VLLM_NIXL_SIDE_CHANNEL_PORT=20005 \
  VLLM_NO_USAGE_STATS=1 \
  PYTHONPATH=/pdlaunch/engine_middleware \
  /cache/engine/bin/vllm serve /cache/models/tiny-qwen3 \
  --served-model-name tiny-qwen3 \
  --host 127.0.0.1 \
  --port 20004 \
  --tensor-parallel-size 1 \
  --block-size 32 \
  --max-model-len 8192 \
  --kv-cache-memory-bytes 1073741824 \
  --kv-transfer-config '{"kv_connector": "NixlPushConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "fail"}' \
  --disable-access-log-for-endpoints /health,/metrics \
  --enforce-eager \
  --dtype float32 \
  --middleware pdlaunch_drain.Drain

# decode-1: http://127.0.0.1:20006; side channel 20007; cores 3
env -u PYTHONHOME -u PYTHONPATH -u VLLM_CPU_KVCACHE_SPACE \
  HF_HUB_OFFLINE=1 \
  VLLM_CPU_OMP_THREADS_BIND=3 \
  VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120 \
  VLLM_MQ_BUSY_LOOP_SECONDS=0.001 \
  VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 \
  VLLM_NIXL_SIDE_CHANNEL_PORT=20007 \
  VLLM_NO_USAGE_STATS=1 \
  PYTHONPATH=/pdlaunch/engine_middleware \
  /cache/engine/bin/vllm serve /cache/models/tiny-qwen3 \
  --served-model-name tiny-qwen3 \
  --host 127.0.0.1 \
  --port 20006 \
  --tensor-parallel-size 1 \
  --block-size 32 \
  --max-model-len 8192 \
  --kv-cache-memory-bytes 1073741824 \
  --kv-transfer-config '{"kv_connector": "NixlPushConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "fail"}' \
  --disable-access-log-for-endpoints /health,/metrics \
  --enforce-eager \
  --dtype float32 \
  --middleware pdlaunch_drain.Drain

# router: http://127.0.0.1:20008; metrics 20009
env -u PYTHONHOME -u PYTHONPATH -u VLLM_NIXL_SIDE_CHANNEL_SECRET \
  /cache/engine/bin/vllm-router \
  --vllm-pd-disaggregation \
  --policy round_robin \
  --host 127.0.0.1 \
  --port 20008 \
  --prometheus-host 127.0.0.1 \
  --prometheus-port 20009 \
  --prefill http://127.0.0.1:20000 \
  --prefill http://127.0.0.1:20002 \
  --decode http://127.0.0.1:20004 \
  --decode http://127.0.0.1:20006 \
  --worker-startup-check-interval 1 \
  --health-check-interval-secs 1
