{{- /* What the pods of prefill and decode have beside what every pod has. */ -}}
{{- define "pdserve.prefill" -}}{{ include "pdserve.worker" (dict "root" . "role" "prefill") }}{{- end -}}
{{- define "pdserve.decode" -}}{{ include "pdserve.worker" (dict "root" . "role" "decode") }}{{- end -}}

{{- define "pdserve.worker" -}}
{{- $name := include "pdserve.fullname" .root -}}
{{- $gpu := eq .root.Values.workers.device "gpu" -}}
{{- with .root.Values -}}
{{- if and $gpu .workers.gpu.hostNamespaces -}}
pod: { hostIPC: true, hostPID: true }
{{ end -}}
{{- if $gpu -}}
tolerations: [{ key: nvidia.com/gpu, operator: Exists, effect: NoSchedule }]
{{ end -}}
ports:
  - { name: grpc, containerPort: 50051 }
  - { name: metrics, containerPort: 9090 }
  - { name: probe, containerPort: 50059 }
  {{- if eq $.role "decode" }}
  - { name: kv, containerPort: 50052 } # prefill pods send keys and values here
  {{- end }}
env:
  - name: POD_IP
    valueFrom: { fieldRef: { fieldPath: status.podIP } }
  - { name: PDSERVE_ROUTERS, value: "{{ $name }}-router-join:50050" }
  - { name: PDSERVE_BIND, value: "0.0.0.0:50051" }
  - { name: PDSERVE_ADVERTISE, value: "$(POD_IP):50051" }
  - { name: PDSERVE_METRICS_PORT, value: "9090" }
  - { name: PDSERVE_PROBE_PORT, value: "50059" } # probes have no certificate
  - { name: PDSERVE_TRACE_DIR, value: /var/log/pdserve } # rings, for `pdserve report`
  - { name: PDSERVE_ENCRYPT_KV, value: "false" } # true: KV is sealed between pods
  {{- if eq $.role "decode" }}
  - { name: PDSERVE_DATA_BIND, value: "0.0.0.0:50052" }
  - { name: PDSERVE_DATA_ADVERTISE, value: "$(POD_IP):50052" }
  {{- end }}
  {{- if $gpu }}
  - { name: PDSERVE_DEVICE, value: cuda }
  - { name: PDSERVE_KV_TRANSPORT, value: auto }
  {{- if .workers.gpu.hostNamespaces }}
  - { name: PDSERVE_SHM_DIR, value: /dev/shm/pdserve } # the node's, where the workers' sockets meet
  {{- end }}
  {{- else }}
  - { name: PDSERVE_DEVICE, value: cpu }
  - { name: PDSERVE_KV_TRANSPORT, value: tcp }
  {{- end }}
  {{- if .autoscaling.workers }}
  # Beyond it a prompt goes from prefill to decode, and from decode back to the router's queue, which
  # the scalers see and which a new pod takes at once.
  - { name: PDSERVE_MAX_WAITING, value: {{ eq $.role "prefill" | ternary "64" "4" | quote }} }
  {{- if eq $.role "decode" }}
  - { name: PDSERVE_MAX_RUNNING, value: "128" } # the scaler's threshold of rows is below it
  {{- end }}
  {{- end }}
  {{- if .model.huggingFace }}
  - name: PDSERVE_MODEL
    valueFrom: { configMapKeyRef: { name: {{ include "pdserve.modelVolume" $.root }}, key: model } }
  - { name: HF_HUB_CACHE, value: /models }
  - { name: HF_HUB_OFFLINE, value: "1" }
  {{- else if .model.image.reference }}
  - { name: PDSERVE_MODEL, value: "/models/{{ .model.image.name }}" }
  {{- else }}
  - { name: PDSERVE_MODEL, value: {{ .model.path | quote }} } # empty: the model in the image
  {{- end }}
volumeMounts:
  - { name: rings, mountPath: /var/log/pdserve }
  - { name: home, mountPath: /home/pdserve } # digests of weights, and what libraries cache
  {{- if .model.huggingFace }}
  - { name: models, mountPath: /models, readOnly: true }
  {{- else if .model.image.reference }}
  - { name: model, mountPath: "/models/{{ .model.image.name }}", readOnly: true }
  {{- end }}
volumes:
  - { name: rings, emptyDir: { sizeLimit: 128Mi } } # 2 MiB for each start, of which 32 are kept
  - { name: home, emptyDir: { sizeLimit: 2Gi } }
  {{- if .model.huggingFace }}
  - { name: models, persistentVolumeClaim: { claimName: {{ include "pdserve.modelClaim" $.root }}, readOnly: true } }
  {{- include "pdserve.modelScript" $.root | nindent 2 }}
  {{- else if .model.image.reference }}
  - { name: model, image: { reference: {{ .model.image.reference | quote }}, pullPolicy: IfNotPresent } }
  {{- end }}
{{- if .model.huggingFace }}
initContainers: # workers wait until the whole model is there, and read it; they never ask the hub
  - name: model
    image: {{ include "pdserve.image" (dict "root" $.root "image" "worker") }}
    command: [python, /etc/pdserve/model/model_volume.py, wait]
    {{- include "pdserve.containerSecurity" $.root | nindent 4 }}
    env:
      - name: PDSERVE_MODEL
        valueFrom: { configMapKeyRef: { name: {{ include "pdserve.modelVolume" $.root }}, key: model } }
      - { name: HF_HUB_CACHE, value: /models }
    volumeMounts:
      - { name: models, mountPath: /models, readOnly: true }
      - { name: script, mountPath: /etc/pdserve/model, readOnly: true }
    resources:
      requests: { cpu: 10m, memory: 64Mi, ephemeral-storage: 16Mi }
      limits: { memory: 256Mi, ephemeral-storage: 64Mi }
{{- end }}
startupProbe: { grpc: { port: 50059 }, periodSeconds: 5, failureThreshold: 240 } # 20 minutes to load
readinessProbe: { grpc: { port: 50059 }, periodSeconds: 5 }
livenessProbe: { grpc: { port: 50059 }, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 3 }
{{- end -}}
{{- end -}}
