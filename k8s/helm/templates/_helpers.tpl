{{- /* The start of every object's name. The longest ending, of the model's Job, has 17 characters. */ -}}
{{- define "pdserve.fullname" -}}
{{- $name := .Values.fullnameOverride | default (contains "pdserve" .Release.Name | ternary .Release.Name (printf "%s-pdserve" .Release.Name)) -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]*$" $name) -}}
{{- fail (printf "%q cannot start the names of Services, which begin with a letter and contain only lower-case letters, digits and hyphens; set fullnameOverride" $name) -}}
{{- end -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* Labels that selectors use. Takes root and, for one role, role; with pool, also the workers'. */ -}}
{{- define "pdserve.selector" -}}
app.kubernetes.io/name: pdserve
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- if and .pool (has .pool (list "prefill" "decode")) }}
pdserve.internal/pool: first
{{- end }}
{{- end -}}

{{- /* Labels of an object. Takes what pdserve.selector takes. */ -}}
{{- define "pdserve.labels" -}}
{{ include "pdserve.selector" . }}
{{ include "pdserve.chartLabels" .root }}
{{- end -}}

{{- define "pdserve.chartLabels" -}}
app.kubernetes.io/part-of: pdserve
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* The reference of an image. Takes root and the image's key. */ -}}
{{- define "pdserve.image" -}}
{{- $image := index .root.Values.images .image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- /* The rights of a pod on its node. */ -}}
{{- define "pdserve.podSecurity" -}}
enableServiceLinks: false
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "pdserve.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end -}}

{{- /* Where the pods of Jobs run. */ -}}
{{- define "pdserve.jobPlacement" -}}
{{- with .Values.jobs.nodeSelector -}}
nodeSelector: {{- toYaml . | nindent 2 }}
{{ end -}}
{{- with .Values.jobs.tolerations -}}
tolerations: {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{- /* Variables of every role. */ -}}
{{- define "pdserve.everyEnv" -}}
- { name: PDSERVE_CLUSTER_CA, value: /etc/pdserve/tls/ca.crt }
- { name: PDSERVE_CLUSTER_CERT, value: /etc/pdserve/tls/tls.crt }
- { name: PDSERVE_CLUSTER_KEY, value: /etc/pdserve/tls/tls.key }
# Longer than the longest stream (PDSERVE_REQUEST_TIMEOUT_S) that began as late as it can.
- { name: PDSERVE_DRAIN_S, value: "610" }
{{- end -}}

{{- /* A file of the chart that k8s/ shares, with this release's names. Takes root and file. */ -}}
{{- define "pdserve.file" -}}
{{- .root.Files.Get .file | replace "pdserve-" (printf "%s-" (include "pdserve.fullname" .root)) | replace "instance: pdserve" (printf "instance: %s" .root.Release.Name) -}}
{{- end -}}

{{- /* The name of the model's ConfigMap and Job: another model, script or image is another Job, since a
Job's pods cannot change. */ -}}
{{- define "pdserve.modelVolume" -}}
{{- $image := include "pdserve.image" (dict "root" . "image" "worker") -}}
{{- $hash := printf "%s\n%s\n%s" .Values.model.huggingFace $image (.Files.Get "files/model_volume.py") | sha256sum | trunc 10 -}}
{{ include "pdserve.fullname" . }}-model-{{ $hash }}
{{- end -}}

{{- /* Peers of a network policy in these address ranges. */ -}}
{{- define "pdserve.addresses" -}}
{{- range . }}
- ipBlock: { cidr: {{ . }} }
{{- end }}
{{- end -}}

{{- /* Peers of a network policy: the pods of these roles. Takes root and roles. */ -}}
{{- define "pdserve.peers" -}}
{{- range .roles }}
- podSelector:
    matchLabels: {{- include "pdserve.selector" (dict "root" $.root "role" .) | nindent 6 }}
{{- end }}
{{- end -}}

{{- /* Annotations of an object that exists while Helm installs or upgrades. Takes the weight. */ -}}
{{- define "pdserve.hook" -}}
helm.sh/hook: pre-install,pre-upgrade
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}
