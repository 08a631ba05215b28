# qwen3-32b-trn2-host-buffer: Qwen/Qwen3-32B, KV by push, vLLM 0.32.0+pd.1

# --- 127.0.0.1 (this machine) ---

# prefill-0: http://127.0.0.1:20000; side channel 20001; devices 0, 1, 2, 3, 4, 5, 6, 7
env -u PYTHONHOME -u PYTHONPATH -u VLLM_CPU_KVCACHE_SPACE \
  FI_EFA_ENABLE_SHM=0 \
  FI_EFA_ENABLE_SHM_TRANSFER=0 \
  FI_EFA_FORK_SAFE=0 \
  FI_EFA_MR_MAX_CACHED_COUNT=524288 \
  FI_EFA_MR_MAX_CACHED_SIZE=0 \
  FI_EFA_USE_DEVICE_RDMA=1 \
  FI_PROVIDER=efa \
  NCCL_SOCKET_IFNAME='^lo,docker,veth' \
  NEURON_RT_VISIBLE_CORES=0-7 \
  NIXL_LOG_LEVEL=INFO \
  VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=3600 \
  VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120 \
  VLLM_NEURON_COMPILATION_TIMEOUT=3600 \
  VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 \
  VLLM_NIXL_SIDE_CHANNEL_PORT=20001 \
  VLLM_NO_USAGE_STATS=1 \
  LD_LIBRARY_PATH="/opt/amazon/efa/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
  /cache/engine/bin/vllm serve Qwen/Qwen3-32B \
  --served-model-name Qwen/Qwen3-32B \
  --host 127.0.0.1 \
  --port 20000 \
  --tensor-parallel-size 8 \
  --block-size 64 \
  --max-model-len 32768 \
  --kv-transfer-config '{"kv_connector": "NixlPushConnector", "kv_role": "kv_producer", "kv_load_failure_policy": "fail", "kv_buffer_device": "cpu", "kv_connector_extra_config": {"backends": ["LIBFABRIC"]}}' \
  --disable-access-log-for-endpoints /health,/metrics \
  --dtype bfloat16

# decode-0: http://127.0.0.1:20002; side channel 20003; devices 8, 9, 10, 11, 12, 13, 14, 15
env -u PYTHONHOME -u PYTHONPATH -u VLLM_CPU_KVCACHE_SPACE \
  FI_EFA_ENABLE_SHM=0 \
  FI_EFA_ENABLE_SHM_TRANSFER=0 \
  FI_EFA_FORK_SAFE=0 \
  FI_EFA_MR_MAX_CACHED_COUNT=524288 \
  FI_EFA_MR_MAX_CACHED_SIZE=0 \
  FI_EFA_USE_DEVICE_RDMA=1 \
  FI_PROVIDER=efa \
  NCCL_SOCKET_IFNAME='^lo,docker,veth' \
  NEURON_RT_VISIBLE_CORES=8-15 \
  NIXL_LOG_LEVEL=INFO \
  VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=3600 \
  VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120 \
  VLLM_NEURON_COMPILATION_TIMEOUT=3600 \
  VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 \
  VLLM_NIXL_SIDE_CHANNEL_PORT=20003 \
  VLLM_NO_USAGE_STATS=1 \
  LD_LIBRARY_PATH="/opt/amazon/efa/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
  /cache/engine/bin/vllm serve Qwen/Qwen3-32B \
  --served-model-name Qwen/Qwen3-32B \
  --host 127.0.0.1 \
  --port 20002 \
  --tensor-parallel-size 8 \
  --block-size 64 \
  --max-model-len 32768 \
  --kv-transfer-config '{"kv_connector": "NixlPushConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "fail", "kv_buffer_device": "cpu", "kv_connector_extra_config": {"backends": ["LIBFABRIC"]}}' \
  --disable-access-log-for-endpoints /health,/metrics \
  --dtype bfloat16

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
