{{- /* What a router's pod has beside what every pod has. */ -}}
{{- define "pdserve.router" -}}
ports:
  - { name: grpc, containerPort: 50050 }
  - { name: metrics, containerPort: 9090 }
  - { name: probe, containerPort: 50059 }
env:
  - { name: PDSERVE_BIND, value: "0.0.0.0:50050" }
  - { name: PDSERVE_REQUEST_TIMEOUT_S, value: "600" } # of Generate
  - { name: PDSERVE_METRICS_PORT, value: "9090" }
  - { name: PDSERVE_PROBE_PORT, value: "50059" } # probes have no certificate
  - { name: PDSERVE_TRACE_DIR, value: /var/log/pdserve } # rings, for `pdserve report`
volumeMounts:
  - { name: rings, mountPath: /var/log/pdserve }
volumes:
  - { name: rings, emptyDir: { sizeLimit: 128Mi } } # 2 MiB for each start, of which 32 are kept
startupProbe: { grpc: { port: 50059 }, periodSeconds: 1, failureThreshold: 60 }
readinessProbe: { grpc: { port: 50059 }, periodSeconds: 2 }
livenessProbe: { grpc: { port: 50059 }, periodSeconds: 10, timeoutSeconds: 5 }
{{- end -}}
