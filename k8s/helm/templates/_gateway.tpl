{{- /* What a gateway's pod has beside what every pod has. */ -}}
{{- define "pdserve.gateway" -}}
{{- $name := include "pdserve.fullname" . -}}
podLabels: { pdserve.internal/gateway: "true" }
ports:
  - { name: http, containerPort: 8000 }
  - { name: grpc, containerPort: 8001 }
env:
  - { name: PDSERVE_HOST, value: "0.0.0.0" }
  - { name: PDSERVE_PORT, value: "8000" }
  - { name: PDSERVE_GRPC_PORT, value: "8001" }
  - { name: PDSERVE_ROUTERS, value: "{{ $name }}-router:50050" }
  - { name: PDSERVE_REQUEST_TIMEOUT_S, value: "600" } # no stream is longer
  # New requests are taken for so long after SIGTERM: endpoints learn that it ends.
  - { name: PDSERVE_LAME_DUCK_S, value: "5" }
  - { name: PDSERVE_API_KEY_FILE, value: /etc/pdserve/keys/api-keys } # read again when it changes
  {{- if .Values.monitoring.enabled }}
  - { name: PDSERVE_FLEET_METRICS, value: "false" } # routers and workers are scraped themselves
  {{- end }}
  {{- with .Values.database.existingSecret }}
  - name: PDSERVE_DATABASE_URL
    valueFrom: { secretKeyRef: { name: {{ . }}, key: url } }
  {{- end }}
volumeMounts:
  - { name: keys, mountPath: /etc/pdserve/keys, readOnly: true }
volumes:
  - { name: keys, secret: { secretName: {{ .Values.apiKeys.existingSecret | default $name }}, defaultMode: 0440 } }
startupProbe: { httpGet: { path: /health, port: http }, periodSeconds: 1, failureThreshold: 60 }
readinessProbe: { httpGet: { path: /ready, port: http }, periodSeconds: 2 }
livenessProbe: { httpGet: { path: /health, port: http }, periodSeconds: 10, timeoutSeconds: 5 }
{{- end -}}
