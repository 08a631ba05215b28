# qwen3-32b-p5en: Qwen/Qwen3-32B, KV by push, vLLM 0.32.0+pd.1

# --- 10.0.0.11 (this machine) ---

# prefill-0: http://10.0.0.11:8100; side channel 5600; devices 0, 1, 2, 3
env -u PYTHONHOME -u PYTHONPATH -u VLLM_CPU_KVCACHE_SPACE \
  CUDA_VISIBLE_DEVICES=0,1,2,3 \
  FI_EFA_ENABLE_SHM=0 \
  FI_EFA_ENABLE_SHM_TRANSFER=0 \
  FI_EFA_FORK_SAFE=0 \
  FI_EFA_MR_MAX_CACHED_COUNT=524288 \
  FI_EFA_MR_MAX_CACHED_SIZE=0 \
  FI_EFA_USE_DEVICE_RDMA=1 \
  FI_EFA_USE_HUGE_PAGE=1 \
  FI_PROVIDER=efa \
  NCCL_SOCKET_IFNAME='^lo,docker,veth' \
  NIXL_LOG_LEVEL=INFO \
  VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120 \
  VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.11 \
  VLLM_NIXL_SIDE_CHANNEL_PORT=5600 \
  VLLM_NO_USAGE_STATS=1 \
  LD_LIBRARY_PATH="/opt/amazon/efa/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
  /cache/engine/bin/vllm serve Qwen/Qwen3-32B \
  --served-model-name Qwen/Qwen3-32B \
  --host 10.0.0.11 \
  --port 8100 \
  --tensor-parallel-size 4 \
  --block-size 128 \
  --max-model-len 32768 \
  --gpu-memory-utilization 0.9 \
  --kv-transfer-config '{"kv_connector": "NixlPushConnector", "kv_role": "kv_producer", "kv_load_failure_policy": "fail", "kv_connector_extra_config": {"backends": ["LIBFABRIC"]}}' \
  --disable-access-log-for-endpoints /health,/metrics

# router: http://10.0.0.11:8000; metrics 29000
env -u PYTHONHOME -u PYTHONPATH -u VLLM_NIXL_SIDE_CHANNEL_SECRET \
  /cache/engine/bin/vllm-router \
  --vllm-pd-disaggregation \
  --policy round_robin \
  --host 10.0.0.11 \
  --port 8000 \
  --prometheus-host 10.0.0.11 \
  --prometheus-port 29000 \
  --prefill http://10.0.0.11:8100 \
  --decode http://10.0.0.12:8200 \
  --worker-startup-check-interval 1 \
  --health-check-interval-secs 1

# --- 10.0.0.12 (another host: `pdlaunch up RECIPE --only decode` there) ---
# The paths are those of this machine; `pdlaunch up` has its own there.

# decode-0: http://10.0.0.12:8200; side channel 5600; devices 0, 1, 2, 3
env -u PYTHONHOME -u PYTHONPATH -u VLLM_CPU_KVCACHE_SPACE \
  CUDA_VISIBLE_DEVICES=0,1,2,3 \
  FI_EFA_ENABLE_SHM=0 \
  FI_EFA_ENABLE_SHM_TRANSFER=0 \
  FI_EFA_FORK_SAFE=0 \
  FI_EFA_MR_MAX_CACHED_COUNT=524288 \
  FI_EFA_MR_MAX_CACHED_SIZE=0 \
  FI_EFA_USE_DEVICE_RDMA=1 \
  FI_EFA_USE_HUGE_PAGE=1 \
  FI_PROVIDER=efa \
  NCCL_SOCKET_IFNAME='^lo,docker,veth' \
  NIXL_LOG_LEVEL=INFO \
  VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120 \
  VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.12 \
  VLLM_NIXL_SIDE_CHANNEL_PORT=5600 \
  VLLM_NO_USAGE_STATS=1 \
  LD_LIBRARY_PATH="/opt/amazon/efa/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
  /cache/engine/bin/vllm serve Qwen/Qwen3-32B \
  --served-model-name Qwen/Qwen3-32B \
  --host 10.0.0.12 \
  --port 8200 \
  --tensor-parallel-size 4 \
  --block-size 128 \
  --max-model-len 32768 \
  --gpu-memory-utilization 0.9 \
  --kv-transfer-config '{"kv_connector": "NixlPushConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "fail", "kv_connector_extra_config": {"backends": ["LIBFABRIC"]}}' \
  --disable-access-log-for-endpoints /health,/metrics
